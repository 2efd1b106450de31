"""Horovod's modules for scripts that were written for it, with ringcomm behind them.

It is found only where ``ringrun --horovod`` has put its folder into ``PYTHONPATH``. A module like
``horovod.torch`` *is* ringcomm's adapter, under another name.
"""

import sys

from ringcomm import setting_aliases
from ringrun.plan.horovod import from_program

from ._forward import Forwarder
from .runner import run

__version__ = "0.28.1"
"""The version of Horovod whose interface this follows; ``ringcomm.__version__`` is the real one."""

if not any(isinstance(finder, Forwarder) for finder in sys.meta_path):
    # First: a module that stands for another has that one's path, where the usual finders would look.
    sys.meta_path.insert(0, Forwarder())

if from_program not in setting_aliases.sources:
    setting_aliases.sources.append(from_program)

__all__ = ["__version__", "run"]
