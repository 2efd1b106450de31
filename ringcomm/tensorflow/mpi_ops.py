"""The collectives under Horovod's module name; Horovod's own tests also read ``_basics`` here."""

from .._adapter.basics import *  # noqa: F403
from .._adapter.basics import HorovodBasics
from ..calls.async_calls import join as join
from .collectives import *  # noqa: F403
from .functions import *  # type: ignore[assignment]  # noqa: F403

_basics = HorovodBasics()
