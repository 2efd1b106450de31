"""The elastic states and callbacks of :mod:`ringcomm.keras.elastic`, under Horovod's module name."""

from ...keras.elastic import *  # noqa: F403
