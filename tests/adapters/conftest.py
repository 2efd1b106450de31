"""Adapters are tested where their framework is: elsewhere their tests are not even collected."""

from importlib.util import find_spec

collect_ignore = [name for name in ("tensorflow", "keras") if find_spec(name) is None]
