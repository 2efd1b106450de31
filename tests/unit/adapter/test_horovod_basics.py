"""The object from which Horovod's own modules read rank and size, and its questions about libraries."""

from __future__ import annotations

import pytest

import ringcomm as rc
from ringcomm import api
from ringcomm._adapter import basics
from ringcomm._adapter.basics import HorovodBasics
from ringcomm.errors import ConfigError


def test_it_has_the_functions_that_every_adapter_exports(alone):
    found = HorovodBasics("/no/such/library", "mpi_lib")
    assert (found.rank(), found.size(), found.local_rank(), found.cross_size()) == (0, 1, 0, 1)
    assert found._get_process_set_ids_and_ranks() == {0: [0]}
    assert not hasattr(found, "MPI_LIB_CTYPES")
    with pytest.raises(AttributeError, match="HorovodBasics has no 'nothing' with ringcomm"):
        found.nothing  # noqa: B018


def test_sets_that_are_registered_already_are_left_alone(alone):
    registered = rc.ProcessSet([0])
    registered.process_set_id = 7
    basics.init(process_sets=[registered])  # another one with all ranks would be refused
    assert registered.process_set_id == 7
    with pytest.raises(ConfigError, match="use global_process_set"):
        basics.init(process_sets=[rc.ProcessSet([0])])


class TestElasticJobs:
    """Of an elastic job whose first view is this process alone."""

    @pytest.fixture
    def restarts(self, alone, monkeypatch):
        """What is called after each restart."""
        found = []
        monkeypatch.setattr(api, "is_elastic", lambda: True)
        monkeypatch.setattr(api, "after_restart", found.append)
        return found

    def test_sets_are_registered_as_far_as_their_ranks_are_there(self, restarts):
        every_rank, pair = rc.ProcessSet([0]), rc.ProcessSet([0, 1])
        basics.init(process_sets=[every_rank, pair])
        assert (every_rank.process_set_id, pair.process_set_id) == (0, None), "one is that of all ranks now"
        (again,) = restarts
        every_rank.process_set_id = None
        again()
        assert (every_rank.process_set_id, pair.process_set_id) == (0, None)
