"""`raises`: like ``pytest.raises``, for processes of a job, where pytest does not run; `all_alike`."""

from __future__ import annotations

from typing import Any, Callable, Sequence, Tuple, Type, Union


def raises(
    kind: Union[Type[BaseException], Tuple[Type[BaseException], ...]], call: Callable[[], Any], text: str = ""
) -> Any:
    """The error of this kind, with this text in its message, that a call raises."""
    try:
        call()
    except kind as error:
        assert text in str(error), error
        return error
    raise AssertionError(f"no {kind} was raised")


def all_alike(errors: Sequence[Any], kind: Type[BaseException], *texts: str, **facts: Any) -> None:
    """Ranks have errors of this very kind, with one message that has all texts, and with these attributes."""
    assert len({str(error) for error in errors}) == 1, errors
    for error in errors:
        assert type(error) is kind and {name: getattr(error, name) for name in facts} == facts, error
        assert [text for text in texts if text not in str(error)] == [], error
