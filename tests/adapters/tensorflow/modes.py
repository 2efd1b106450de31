"""The three ways in which TensorFlow runs something."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Sequence

import tensorflow as tf

tf1 = tf.compat.v1

FEW_THREADS = tf1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
"""Thread pools of one thread: a waiting callback that occupied it would deadlock."""


def eagerly(function: Callable[..., Any], arrays: Sequence[Any]) -> List[Any]:
    return [item.numpy() for item in tf.nest.flatten(function(*map(tf.constant, arrays)))]


def in_a_function(function: Callable[..., Any], arrays: Sequence[Any]) -> List[Any]:
    return [item.numpy() for item in tf.nest.flatten(tf.function(function)(*map(tf.constant, arrays)))]


def in_a_graph(function: Callable[..., Any], arrays: Sequence[Any]) -> List[Any]:
    with session_of_a_graph() as session:
        places = [tf1.placeholder(tf.as_dtype(item.dtype), item.shape) for item in arrays]
        results = tf.nest.flatten(function(*places))
        return list(session.run(results, dict(zip(places, arrays))))


@contextlib.contextmanager
def session_of_a_graph() -> Iterator[Any]:
    with tf.Graph().as_default(), tf1.Session(config=FEW_THREADS) as session:
        yield session


MODES = [eagerly, in_a_function, in_a_graph]
