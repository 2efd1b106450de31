"""Data that other processes prepare: ``horovod.tensorflow.data``."""
