"""Settings that a program makes under other names than ``RINGCOMM_*``, just before it joins a job."""

from __future__ import annotations

from typing import Callable, Iterable, List, Mapping, NamedTuple


class OtherName(NamedTuple):
    """What a variable of another name says about one setting.

    Attributes:
        setting: the field of :class:`ringcomm.config.Settings`.
        text: its value, as that setting's parser wants it.
        said: how the user put it, for messages.
    """

    setting: str
    text: str
    said: str


Source = Callable[[Mapping[str, str]], Iterable[OtherName]]
"""Finds them in an environment."""

sources: List[Source] = []
"""Asked whenever settings are read from the environment; what they find comes before ``RINGCOMM_*``."""
