"""The rules of :mod:`ringcomm.files`, for the agent.

Hosts need not have ringcomm, so the launcher sends that module's text in place of this one
(:func:`ringrun.reach.protocol.compressed_program`): standard library only.
"""

from __future__ import annotations

from ringcomm import files
from ringcomm.files import why_untrusted

__all__ = ["SOURCE", "why_untrusted"]

SOURCE = files.__file__
"""The text that is sent."""
