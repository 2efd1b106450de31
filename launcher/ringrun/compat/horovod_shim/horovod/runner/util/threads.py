"""Functions in threads, as programs written for Horovod start them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional, Sequence


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: Optional[str] = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a function in a thread.

    Args:
        target: the function.
        args: its arguments, a tuple.
        name: of the thread.
        daemon: whether the program may end before the thread does.
        silent: drop what the function raises, instead of printing it.

    Returns:
        the thread, started.

    Raises:
        ValueError: ``args`` is not a tuple.
    """
    _check_tuple(args)
    thread = threading.Thread(target=_silenced(target) if silent else target, args=args, name=name)
    thread.daemon = daemon
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: Optional[threading.Event] = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a thread once an event is set.

    Args:
        event: what is waited for.
        func: the function.
        args: its arguments, a tuple.
        stop: ends the thread without the call.
        check_stop_interval_s: how often ``stop`` is looked at, in seconds.
        daemon: whether the program may end before the thread does; needs ``stop`` if not.
        silent: drop what the function raises.

    Returns:
        the thread, started.

    Raises:
        ValueError: an event is missing, or ``args`` is not a tuple.
    """
    if event is None:
        raise ValueError("on_event() needs an event.")
    if stop is None and not daemon:
        raise ValueError("on_event(daemon=False) needs a stop event, or the program might never end.")
    _check_tuple(args)

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[List[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> Optional[Dict[int, Any]]:
    """Call a function with each list of arguments, in several threads.

    Args:
        fn: the function.
        args_list: the arguments of each call.
        block_until_all_done: wait for the results.
        max_concurrent_executions: how many threads there are at most.

    Returns:
        what the calls returned by their places in the list, or None without waiting.

    Raises:
        RuntimeError: a call raised.
    """
    if not block_until_all_done:
        for arguments in args_list:
            in_thread(fn, tuple(arguments))
        return None
    with ThreadPoolExecutor(max(1, min(max_concurrent_executions, len(args_list)))) as pool:
        futures = [pool.submit(fn, *arguments) for arguments in args_list]
    failed = next((future.exception() for future in futures if future.exception() is not None), None)
    if failed is not None:
        raise RuntimeError(f"{getattr(fn, '__name__', fn)} failed in a thread: {failed!r}") from failed
    return {place: future.result() for place, future in enumerate(futures)}


def _check_tuple(args: Any) -> None:
    if not isinstance(args, tuple):
        raise ValueError(  # noqa: TRY004 - Horovod's kind
            f"args must be a tuple, not {type(args)}; a single argument is (arg,)."
        )


def _silenced(target: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> None:
        try:
            target(*args)
        except Exception:  # noqa: BLE001 - asked for by silent=True
            return

    return run
