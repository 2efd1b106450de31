"""The callbacks of :mod:`ringcomm.keras.callbacks`, under Horovod's module name."""

from ...keras.callbacks import *  # noqa: F403
