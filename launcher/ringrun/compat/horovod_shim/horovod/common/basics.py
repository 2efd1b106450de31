"""``HorovodBasics``, the class of ``hvd.rank()`` and similar functions, for code that instantiates it."""

from ringcomm._adapter.horovod_basics import HorovodBasics

__all__ = ["HorovodBasics"]
