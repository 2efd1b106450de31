"""The collectives under Horovod's module name. (Horovod's tests also use its names with an underscore.)"""

import tensorflow as tf

from .._adapter.basics import *  # noqa: F403
from .._adapter.basics import HorovodBasics
from ..calls.async_calls import join as join
from .collectives import *  # noqa: F403
from .functions import *  # type: ignore[assignment]  # noqa: F403

_basics = HorovodBasics()


def _executing_eagerly() -> bool:
    """Return whether TensorFlow is in eager mode."""
    return bool(tf.executing_eagerly())
