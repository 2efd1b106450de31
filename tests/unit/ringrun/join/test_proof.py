"""The code of a machine that joins, and its proof: what an attacker sends, and what a recording shows."""

from __future__ import annotations

from typing import Tuple

import pytest

from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError
from ringrun.join.proof import (
    CODE_S,
    HELLO,
    WRONG_CODES,
    Code,
    Proof,
    Role,
    new_code,
    parse_code,
    why_over,
)

SHORT, LONG = Code(7, "lusabbabadgutih"), Code(7, "abcdefghijkmnpqrstuvwxyz23")
KEY = Code(40000, "ab" * 32, True)
CODES = [pytest.param(SHORT, id="words"), pytest.param(LONG, id="letters"), pytest.param(KEY, id="key")]
POINT = slice(8 + 2 + 2 + 64 + 1, 8 + 2 + 2 + 64 + 33)


def pair(code: Code, other: Code) -> Tuple[Proof, Proof]:
    pytest.importorskip("spake2")
    joining = Proof(Role.JOINING, code, "desk", b"a" * 32)
    return joining, Proof(Role.LAUNCHER, other, "alice@laptop", b"b" * 32)


@pytest.mark.parametrize("code", CODES)
def test_both_ends_prove_names_and_certificates(code: Code) -> None:
    joining, launcher = pair(code, code)
    launcher.meet(joining.hello)
    joining.meet(launcher.hello)
    launcher.check(joining.own)
    joining.check(launcher.own)
    assert (launcher.peer_name, joining.peer_name) == ("desk", "alice@laptop")
    assert (launcher.peer_fingerprint, joining.peer_fingerprint) == (b"a" * 32, b"b" * 32)
    assert joining.digits == launcher.digits and len(joining.digits) == 4
    assert len(joining.hello) + len(joining.own) < 200


@pytest.mark.parametrize("code", CODES)
def test_another_code_proves_nothing_to_either_end(code: Code) -> None:
    last = "h" if code is SHORT else "4"
    joining, launcher = pair(code, code._replace(secret=code.secret[:-1] + last[:1].replace("h", "k")))
    launcher.meet(joining.hello)
    joining.meet(launcher.hello)
    for end, tag in ((launcher, joining.own), (joining, launcher.own)):
        with pytest.raises(AuthenticationError):
            end.check(tag)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("place", ["name", "share", "fingerprint"])
def test_what_is_changed_on_the_way_proves_nothing(code: Code, place: str) -> None:
    joining, launcher = pair(code, code)
    fields = list(HELLO.unpack(joining.hello))
    if place == "name":
        fields[3] = b"disk"
    elif place == "share":
        fields[4] = pair(code, code)[0].hello[POINT.start - 1 : POINT.stop]
    else:
        fields[5] = b"m" * 32
    launcher.meet(HELLO.pack(*fields))
    joining.meet(launcher.hello)
    with pytest.raises(AuthenticationError):
        launcher.check(joining.own)
    with pytest.raises(AuthenticationError):
        joining.check(launcher.own)


@pytest.mark.parametrize("code", CODES)
def test_own_messages_sent_back_are_refused(code: Code) -> None:
    joining, launcher = pair(code, code)
    with pytest.raises(ProtocolError):
        joining.meet(joining.hello)
    joining, launcher = pair(code, code)
    joining.meet(launcher.hello)
    with pytest.raises(AuthenticationError):
        joining.check(joining.own)


def test_a_recording_does_not_show_whether_a_code_is_right() -> None:
    """Who has recorded a run cannot compute its proofs, even with the right code."""
    joining, launcher = pair(SHORT, SHORT)
    launcher.meet(joining.hello)
    joining.meet(launcher.hello)
    for guess in (SHORT, Code(7, "babadbabadbabad")):
        late, _ = pair(guess, guess)
        late.meet(launcher.hello)
        assert late.own != joining.own
    # The share alone fits every code: it is a random point, whichever multiple of M is subtracted.
    from spake2.ed25519_basic import bytes_to_element
    from spake2.parameters.ed25519 import ParamsEd25519

    share = bytes_to_element(joining.hello[POINT])
    for guess in (SHORT, Code(7, "babadbabadbabad")):
        scalar = ParamsEd25519.group.password_to_scalar(guess.shown.encode())
        assert bytes_to_element(share.add(ParamsEd25519.M.scalarmult(-scalar)).to_bytes())


_ORDER_8 = "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"
POINTS = {
    "identity": b"\1" + bytes(31),
    "zero": bytes(32),
    "order 2": bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    "order 8": bytes.fromhex(_ORDER_8),
    "not on the curve": b"\2" + bytes(31),
    "above the field": b"\xff" * 32,
}


@pytest.mark.parametrize("name", list(POINTS))
@pytest.mark.parametrize("side", [b"A", b"B", b"S", b"\0"])
def test_invalid_points_are_refused_in_one_form(name: str, side: bytes) -> None:
    _, launcher = pair(SHORT, SHORT)
    fields = list(HELLO.unpack(pair(SHORT, SHORT)[0].hello))
    fields[4] = side + POINTS[name]
    with pytest.raises(ProtocolError, match="^its share is not valid$"):
        launcher.meet(HELLO.pack(*fields))


def test_other_versions_kinds_and_names_are_refused() -> None:
    _, launcher = pair(SHORT, SHORT)
    good = HELLO.unpack(pair(SHORT, SHORT)[0].hello)
    for index, value in ((0, b"ringcomm"), (1, 99), (2, 2), (3, b"\x1b[2Jdesk"), (3, b""), (3, b"a b")):
        with pytest.raises(ProtocolError):
            launcher.meet(HELLO.pack(*(*good[:index], value, *good[index + 1 :])))


def test_codes_are_typed_in_any_form() -> None:
    assert parse_code(" 7 LUSAB babad-gutih\n") == parse_code("7-lusab-babad-gutih") == SHORT
    assert parse_code(LONG.shown) == LONG and parse_code("`7\u2013lusab\u2013babad-gutih`.") == SHORT
    for code in (new_code(True), new_code(False)):
        assert parse_code(code.shown) == code
    for text in ("", "7", "7-lusab-babad", "7-lusab-babad-gutex", "7-lusab-babad-\x1b[2J", "7-" + "a" * 27):
        with pytest.raises(ConfigError) as caught:
            parse_code(text)
        assert text[2:] == "" or f"{text} " not in f"{caught.value} ".replace(".", " ")


def test_a_code_has_40_bits_or_more() -> None:
    assert 16**9 * 4**6 >= 2**40 and 32**26 >= 2**128
    assert len({new_code(True).secret for _ in range(200)}) == 200


def test_an_invitation_ends_by_time_or_wrong_codes() -> None:
    assert [why_over(0, left_s) for left_s in (CODE_S, 0.1, 0.0)] == ["", "", "10 minutes"]
    assert [why_over(wrong, 1.0) for wrong in (2, WRONG_CODES, 9)] == ["", *["three wrong codes"] * 2]
