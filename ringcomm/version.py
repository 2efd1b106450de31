"""The version, in the one place from which everything else takes it."""

__version__ = "1.0.0"
