"""The values of ``compression=``, under Horovod's module name ``horovod.tensorflow.compression``."""

from .._adapter.compression import *  # noqa: F403
