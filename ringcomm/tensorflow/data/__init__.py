"""Input pipelines that run in other processes: the counterpart of ``horovod.tensorflow.data``."""
