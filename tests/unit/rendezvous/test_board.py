"""Entries that ranks post for each other at the rendezvous."""

from __future__ import annotations

import pytest

from ringcomm.errors import ProtocolError
from ringcomm.rendezvous import server
from ringcomm.rendezvous.membership import Send
from ringcomm.rendezvous.server import Board


def post(entry, text):
    return {"type": "post", "entry": entry, "text": text}


def wait(entry):
    return {"type": "await", "entry": entry}


def told(connection, entry, text):
    return Send(connection, {"type": "entry", "entry": entry, "text": text})


def test_waiting_readers_get_it_when_it_is_posted_and_later_ones_at_once():
    here = Board()
    assert here.awaited(1, wait("a")) == here.awaited(2, wait("b")) == here.awaited(3, wait("a")) == []
    assert here.posted(0, post("a", "x")) == [told(0, "a", "x"), told(1, "a", "x"), told(3, "a", "x")]
    assert here.awaited(4, wait("a")) == [told(4, "a", "x")]
    assert here.posted(0, post("a", "y")) == [told(0, "a", "y")]
    assert here.awaited(4, wait("a")) == [told(4, "a", "y")]


def change(how, entry, text="", before=""):
    return {"type": "change", "how": how, "entry": entry, "text": text, "before": before}


def test_entries_change_as_in_a_store_of_pytorch():
    here = Board()
    here.awaited(2, wait("n"))
    assert here.changed(1, change("add", "n", "5")) == [told(1, "n", "5"), told(2, "n", "5")]
    assert here.changed(1, change("add", "n", "-7")) == [told(1, "n", "-2")]
    assert here.changed(1, change("compare", "n", "x", "y")) == [told(1, "n", "-2")]
    assert here.changed(1, change("compare", "n", "x", "-2")) == [told(1, "n", "x")]
    assert here.changed(1, change("compare", "new", "x", "y")) == [told(1, "new", "y")]
    assert here.changed(1, change("compare", "new", "x")) == [told(1, "new", "x")]
    assert here.changed(1, change("count", "n")) == [told(1, "n", "2")]
    for text in ("1", ""):
        assert here.changed(1, change("check", "n")) == [told(1, "n", text)]
        assert here.changed(1, change("delete", "n")) == [told(1, "n", text)]
    for odd in (change("add", "new", "1"), change("add", "m", "9" * 30), change("grow", "m")):
        with pytest.raises(ProtocolError):
            here.changed(1, odd)


def test_a_rank_that_has_left_gets_nothing():
    here = Board()
    here.awaited(1, wait("a"))
    here.awaited(2, wait("a"))
    here.awaited(1, wait("b"))
    here.left(1)
    assert here.posted(0, post("a", "x")) == [told(0, "a", "x"), told(2, "a", "x")]
    assert here.posted(0, post("b", "x")) == [told(0, "b", "x")]


def test_there_are_limits(monkeypatch):
    here = Board()
    with pytest.raises(ProtocolError, match="too long"):
        here.posted(0, post("a", "x" * server.MAX_ENTRY_BYTES))
    monkeypatch.setattr(server, "MAX_ENTRIES", 2)
    for entry in "ab":
        here.posted(0, post(entry, ""))
        here.awaited(0, wait(entry + entry))
    with pytest.raises(ProtocolError, match="one too many"):
        here.posted(0, post("c", ""))
    with pytest.raises(ProtocolError, match="too many entries"):
        here.awaited(0, wait("c"))
