"""The callbacks of :mod:`ringcomm.keras.callbacks`, under the name ``horovod.tensorflow.keras.callbacks``."""

from ...keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    CheckSameCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CheckSameCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
