"""Settings that a program makes under other names than ``RINGCOMM_*``, just before it joins a job."""

from __future__ import annotations

from typing import Callable, Iterable, List, Mapping, NamedTuple


class OtherName(NamedTuple):
    """A setting that is given by a variable of another name.

    Attributes:
        setting: the field of :class:`ringcomm.config.Settings`.
        text: its value, in the form that the setting's parser takes.
        said: the setting as the user wrote it, for messages.
    """

    setting: str
    text: str
    said: str


Source = Callable[[Mapping[str, str]], Iterable[OtherName]]
"""Finds them in an environment."""

sources: List[Source] = []
"""Called whenever settings are read from the environment; their results override ``RINGCOMM_*``."""
