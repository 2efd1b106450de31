"""The package ``horovod`` for scripts that were written for Horovod, implemented by ringcomm.

It is importable only where ``ringrun --horovod`` has added its folder to ``PYTHONPATH``. A module like
``horovod.torch`` *is* ringcomm's adapter, under another name.
"""

import sys

from ringcomm.configuration import settings
from ringrun.plan.environment import horovod_settings_of_program

from ._forward import Forwarder
from .runner import run

__version__ = "0.28.1"
"""The version of Horovod whose interface this implements; ringcomm's own is ``ringcomm.__version__``."""

if not any(isinstance(finder, Forwarder) for finder in sys.meta_path):
    # First: an alias has the other module's path, in which the usual finders would search.
    sys.meta_path.insert(0, Forwarder())

if horovod_settings_of_program not in settings.aliases:
    settings.aliases.append(horovod_settings_of_program)

__all__ = ["__version__", "run"]
