"""TensorFlow 2.15 and older bring Keras 2, which the adapters for Keras refuse in a sentence."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, types
sys.modules["keras"] = keras = types.ModuleType("keras")
keras.__version__ = "2.15.0"
import ringcomm.keras
"""


def test_what_is_needed_in_place_of_keras_2_is_named() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "ImportError: ringcomm.keras and ringcomm.tensorflow.keras need Keras 3" in done.stderr
    assert "TensorFlow 2.16" in done.stderr and "this is Keras 2.15.0" in done.stderr
