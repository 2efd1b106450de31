"""The names that packages export again."""

from __future__ import annotations

import os

from ringcomm.docstrings import export


def test_names_without_modules_and_those_with_an_underscore():
    package = {"rank": len, "_private": len, "os": os, "Average": 1, "elastic": os}
    assert export(package, "elastic", "later") == ["Average", "elastic", "later", "rank"]
    assert package["__all__"] == ["Average", "elastic", "later", "rank"]
