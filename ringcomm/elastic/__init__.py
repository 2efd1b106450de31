"""Elastic training: ranks may be lost and may join while a program runs, and the living ranks continue."""

from ..api import take_changes
from .state import ArrayState, ElasticSampler, ObjectState, State, run

__all__ = ["ArrayState", "ElasticSampler", "ObjectState", "State", "run", "take_changes"]
