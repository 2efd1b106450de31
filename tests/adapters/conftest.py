"""Adapters are tested where their framework is: elsewhere their tests are not even collected."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore = [name for name in ("tensorflow", "keras", "mxnet", "jax", "mlx") if find_spec(name) is None]
if not any(find_spec(name) for name in ("ray", "distributed", "pyspark")):
    collect_ignore.append("clusters")


def pytest_collection_modifyitems(items):
    """Frameworks take their time: several processes that import one, on a machine where much else runs."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(330))
