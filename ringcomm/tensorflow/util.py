"""A function that Horovod's own tests import from here."""

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Return whether TensorFlow is in eager mode."""
    return bool(tf.executing_eagerly())
