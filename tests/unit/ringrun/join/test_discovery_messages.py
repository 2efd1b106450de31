"""What discovery sends: a number and a port, in answers that are shorter than questions."""

from __future__ import annotations

import struct

import pytest

from ringcomm.errors import ConfigError
from ringrun.join.command import read_words
from ringrun.join.connection import _ASKED, _QUESTION, answer_to, said_in

NONCE = bytes(range(16))
QUESTION = _QUESTION.pack(_ASKED, NONCE, 7)


def test_an_answer_has_a_number_and_a_port_and_nothing_else() -> None:
    answer = answer_to(QUESTION, [5, 7], 43117)
    assert answer == b"ringjoin!" + NONCE + struct.pack("!HH", 7, 43117) and len(answer) < len(QUESTION)
    assert said_in(answer, NONCE, 7) == 43117


@pytest.mark.parametrize("data", [b"", QUESTION[:-1], QUESTION + b"x", b"\0" + QUESTION[1:], QUESTION])
def test_what_is_no_question_about_an_own_number_is_not_answered(data: bytes) -> None:
    assert answer_to(data, [8], 43117) == b""


def test_answers_to_others_or_of_others_do_not_count() -> None:
    answer = answer_to(QUESTION, [7], 43117)
    assert said_in(answer, NONCE, 8) == 0
    assert said_in(answer, bytes(16), 7) == 0
    assert said_in(answer[:-2] + b"\0\0", NONCE, 7) == 0
    assert said_in(answer + b"x", NONCE, 7) == 0
    assert said_in(b"", NONCE, 7) == 0


def test_address_and_code_are_told_apart() -> None:
    assert read_words([]) == (None, "")
    assert read_words(["7-lusab-babad-gutih"]) == (None, "7-lusab-babad-gutih")
    assert read_words(["10.0.0.1:80", "7", "lusab"]) == (("10.0.0.1", 80), "7 lusab")
    assert read_words(["[fe80::1]:80"]) == (("fe80::1", 80), "")
    for word in (":80", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:x", "[]:1", "a:70000", "10.0.0.1", "alice-pc"):
        with pytest.raises(ConfigError):
            read_words([word])
