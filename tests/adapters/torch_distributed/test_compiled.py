"""``torch.compile`` over the backend; see ``checks_compiled.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.release


def test_compiled_programs_give_the_same_numbers_as_over_gloo(harness):
    harness.check("checks_compiled.py", 2)
