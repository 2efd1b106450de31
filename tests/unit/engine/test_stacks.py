"""Stacks of the program's threads: where each one is, innermost call last."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict

from ringcomm.engine.stacks import parse, thread_stacks


def deep(levels: int, then: Callable[[], Any]) -> Any:
    return then() if levels == 0 else deeper(levels - 1, then)


def deeper(levels: int, then: Callable[[], Any]) -> Any:
    """Another line than in :func:`deep`: Python writes a line that repeats itself only a few times."""
    return then() if levels == 0 else deep(levels - 1, then)


def test_all_threads_with_the_main_one_first():
    entered, leave = threading.Event(), threading.Event()

    def waits_here() -> None:
        entered.set()
        leave.wait(30.0)

    thread = threading.Thread(target=waits_here, name="another thread")
    thread.start()
    try:
        assert entered.wait(30.0)
        found = deep(50, thread_stacks)
    finally:
        leave.set()
        thread.join()
    assert [item["main"] for item in found] == [True] + [False] * (len(found) - 1)
    by_name: Dict[str, Any] = {item["name"]: item["frames"] for item in found}
    assert "waits_here" in [function for _, _, function in by_name["another thread"]]
    main = found[0]["frames"]
    assert len(main) == 30 and "thread_stacks" in [function for _, _, function in main[-2:]]
    assert all(file.endswith(".py") or "<" in file for file, line, _ in main if line > 0)


def test_what_faulthandler_writes_of_names_that_are_not_ascii():
    text = 'Thread 0x1f (most recent call first):\n  File "/home/\\xf6rg/\\u4e2d.py", line 3 in f\nThread 0x2'
    assert parse(text) == ({0x1F: [("/home/örg/中.py", 3, "f")], 2: []}, True)
