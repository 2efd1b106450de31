"""The contents of :mod:`ringcomm.keras.elastic`, under the name ``horovod.tensorflow.keras.elastic``."""

from ...keras.elastic import (
    CommitStateCallback,
    ElasticSampler,
    KerasState,
    ObjectState,
    State,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "ElasticSampler",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
