"""Settings that a program makes under other names than ``RINGCOMM_*``, just before it joins a job."""

from __future__ import annotations

from typing import Callable, Iterable, List, Mapping, NamedTuple


class OtherName(NamedTuple):
    """A setting that is given by a variable of another name."""

    setting: str  # the field of :class:`ringcomm.config.Settings`
    text: str  # in the form that the setting's parser takes
    said: str  # as the user wrote it, for messages


Source = Callable[[Mapping[str, str]], Iterable[OtherName]]  # finds them in an environment

sources: List[Source] = []  # called whenever settings are read from the environment; override RINGCOMM_*
