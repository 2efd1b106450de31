"""The class behind ``hvd.rank()`` and its like, for code that makes one itself."""

from ringcomm._adapter.horovod_basics import HorovodBasics

__all__ = ["HorovodBasics"]
