"""RayExecutor and its workers with actors that are objects of this process: errors that Ray makes rarely."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Callable, Iterator, List, Optional

import pytest

import ringcomm as rc
from ringcomm._adapter.placed import Host, Ticket
from ringcomm.config import Settings
from ringcomm.configuration import environment
from ringcomm.errors import ConfigError, NotOfferedError, RemoteError, StartTimeoutError
from ringcomm.storage.results import unpack

ray = pytest.importorskip("ray")

import ringcomm.ray  # noqa: E402 - it needs Ray
from ringcomm.ray import RayExecutor, executor, workers  # noqa: E402
from ringcomm.ray.settings import job_settings  # noqa: E402
from ringcomm.ray.workers import Placement, Worker, WorkerFacts  # noqa: E402

ALONE = Ticket("job", 0, 1, 0, {"RINGCOMM_SIZE": "1"})
LOST = ray.exceptions.RayActorError
LATE = ray.exceptions.GetTimeoutError


class Reference:
    """What a call has returned or raised; or what Ray raises in place of that."""

    def __init__(self, function: Callable[[], Any], instead: Optional[type]) -> None:
        self.value: Any = None
        self.error: Optional[BaseException] = None
        try:
            if instead is not None:
                raise instead()
            self.value = function()
        except Exception as error:  # noqa: BLE001 - raised by `get`
            self.error = error

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Actor:
    """A handle of a worker, whose calls run immediately in this thread."""

    def __init__(self) -> None:
        self._worker = Worker()
        self.failing: dict = {}  # by method name, what Ray raises in place of the result

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)
        return SimpleNamespace(
            remote=lambda *given: Reference(lambda: method(*given), self.failing.get(name))
        )


class Ray:
    """The calls of Ray that RayExecutor makes; `killed` actors and `removed` placement groups are kept."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.made: List[Actor] = []
        self.killed: List[Actor] = []
        self.removed: List[Any] = []
        self.failing: dict = {}
        self.room = True
        self.current: Any = None
        self.util = SimpleNamespace(
            get_current_placement_group=lambda: self.current,
            placement_group=self._group,
            remove_placement_group=self.removed.append,
        )

    def _group(self, bundles: Any, strategy: str) -> Any:
        return SimpleNamespace(bundles=bundles, strategy=strategy, wait=lambda timeout_seconds: self.room)

    def remote(self, cls: Any) -> Any:
        assert cls is Worker
        return SimpleNamespace(options=self._options)

    def _options(self, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda: self._make(options))

    def _make(self, options: Any) -> Actor:
        actor = Actor()
        actor.failing.update(self.failing)
        actor.options = options
        self.made.append(actor)
        return actor

    def get(self, references: Any, timeout: Optional[float] = None) -> Any:
        if isinstance(references, list):
            return [item.get() for item in references]
        return references.get()

    def wait(self, references: List[Any], num_returns: int, timeout: float) -> Any:
        return references, []

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)

    def cluster_resources(self) -> Any:
        return {"CPU": 4.0}

    available_resources = cluster_resources

    def get_runtime_context(self) -> Any:
        number = len(self.made) % 2
        return SimpleNamespace(get_node_id=lambda: "node", get_accelerator_ids=lambda: {"GPU": [str(number)]})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    """Ray in this process, which is no rank afterwards."""
    found = Ray()
    monkeypatch.setattr(executor, "ray", found)
    monkeypatch.setattr(workers, "ray", found)
    monkeypatch.setattr(workers, "PlacementGroupSchedulingStrategy", lambda **options: options)
    yield found
    for actor in found.made:
        actor._worker.leave()
    rc.shutdown()
    environment.assign({})


class Counter:
    """An object of a worker."""

    def __init__(self, start: int, step: int = 1) -> None:
        rc.init()
        self.value, self.step = start, step

    def count(self) -> int:
        self.value += self.step
        return self.value


def fail(_: Any) -> None:
    rc.init()
    raise KeyError("no such sample")


def in_job(_: Any) -> List[int]:
    rc.init()
    return [rc.rank(), rc.size()]


class TestWorker:
    def test_it_keeps_its_object_and_its_rank_between_calls(self, here: Ray) -> None:
        worker = Worker()
        worker.enter(ALONE)
        assert unpack(worker.make(Counter, [10], {"step": 5}))["ok"]
        assert worker.execute(Counter.count) == 15
        assert unpack(worker.attempt(Counter.count))["value"] == 20
        assert rc.is_initialized()
        worker.leave()
        worker.leave()
        assert not rc.is_initialized()

    def test_after_an_error_it_can_join_again(self, here: Ray) -> None:
        worker = Worker()
        worker.enter(ALONE)
        facts = unpack(worker.attempt(fail))
        assert not facts["ok"] and "no such sample" in facts["summary"] and not rc.is_initialized()
        assert worker.execute(in_job) == [0, 1]
        worker.enter(replace(ALONE, job="next"))  # and leaves the first one
        assert worker.execute(in_job) == [0, 1]
        worker.leave()

    def test_without_a_job_an_error_leaves_no_rank_behind(self, here: Ray) -> None:
        worker = Worker()
        with pytest.raises(KeyError, match="no such sample"):
            worker.execute(fail)
        assert not rc.is_initialized()
        worker.enter(ALONE)
        worker.leave()

    def test_where_it_runs_and_what_its_variables_are(
        self, here: Ray, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("COLOUR", raising=False)
        worker = Worker()
        facts = worker.describe()
        assert facts.host.identity == "node" and facts.gpus == ["0"]
        worker.export({"COLOUR": "blue"})
        assert os.environ.pop("COLOUR") == "blue"


class TestPlacement:
    def test_workers_on_hosts_of_their_own(self, here: Ray) -> None:
        placement = Placement(4, 2, 1.0, 0.0, 5.0, True)
        (group,) = {id(actor.options["scheduling_strategy"]["placement_group"]) for actor in here.made}
        assert group == id(placement._own)
        assert placement._own.strategy == "STRICT_SPREAD" and placement._own.bundles == [{"CPU": 2.0}] * 2
        places = [item.options["scheduling_strategy"]["placement_group_bundle_index"] for item in here.made]
        assert places == [0, 0, 1, 1]
        assert [host.identity for host in placement.hosts] == ["node"] * 4
        group = placement._own
        placement.remove()
        assert here.killed == here.made and here.removed == [group] and placement.workers == []

    def test_the_gpus_of_a_host_are_shared(self, here: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        hosts = iter([("a", "1"), ("b", "0"), ("a", "0")])
        monkeypatch.setattr(Worker, "describe", lambda self: _facts(*next(hosts)))
        said: List[Any] = []
        monkeypatch.setattr(Worker, "export", lambda self, variables: said.append(variables))
        placement = Placement(3, None, 1.0, 1.0, 5.0, False)
        assert [host.identity for host in placement.hosts] == ["a", "a", "b"]
        assert [variables["CUDA_VISIBLE_DEVICES"] for variables in said] == ["1,0", "1,0", "0"]

    def test_the_placement_group_of_the_caller_is_used_and_kept(self, here: Ray) -> None:
        here.current = "the caller's"
        placement = Placement(2, None, 1.0, 0.0, 5.0, True)
        strategy = here.made[0].options["scheduling_strategy"]
        assert strategy == {"placement_group": "the caller's", "placement_group_bundle_index": -1}
        placement.remove()
        assert here.removed == []

    @pytest.mark.parametrize("spread", [None, 1])
    def test_without_room_the_free_resources_are_named(self, here: Ray, spread: Optional[int]) -> None:
        here.room = False
        words = "on hosts of their own within 5 s" if spread else "within 5 s"
        with pytest.raises(StartTimeoutError, match=f"2 times .*{words}.*free now") as caught:
            Placement(2, spread, 1.0, 0.0, 5.0, True)
        assert ("hosts" in str(caught.value)) == bool(spread)
        assert len(here.removed) == 1 and here.made == []

    @pytest.mark.parametrize(("problem", "raised"), [(LATE, StartTimeoutError), (LOST, LOST)])
    def test_workers_that_do_not_start_give_their_resources_back(
        self, here: Ray, problem: type, raised: type
    ) -> None:
        here.failing = {"describe": problem}
        with pytest.raises(raised) as caught:
            Placement(2, None, 1.0, 0.0, 5.0, True)
        assert len(here.removed) == 1
        if raised is StartTimeoutError:
            assert "has not started 2 workers within 5 s" in str(caught.value)


def _facts(node: str, gpu: str) -> WorkerFacts:
    return WorkerFacts(Host(node, f"{node}.local"), [gpu])


class TestExecutor:
    def test_functions_and_objects_in_one_job(self, here: Ray) -> None:
        run = RayExecutor(RayExecutor.create_settings(timeout_s=7), num_workers=1)
        run.start(Counter, [10], {"step": 5}, extra_env_vars={"RINGCOMM_TEST_COLOUR": "blue"})
        assert os.environ.pop("RINGCOMM_TEST_COLOUR") == "blue"
        assert run.execute(Counter.count) == [15]
        assert run.execute_single(Counter.count) == 20
        assert run.run(lambda factor: factor * rc.size(), [3]) == [3]
        assert [item.get() for item in run.run_remote(lambda factor: factor, kwargs={"factor": 4})] == [4]
        with pytest.raises(ConfigError, match=r"Call shutdown\(\) first"):
            run.start()
        with pytest.raises(NotOfferedError, match="callbacks"):
            run.run(print, callbacks=[print])
        run.shutdown()
        run.shutdown()
        assert here.killed == here.made and run.workers == []
        with pytest.raises(ConfigError, match=r"call start\(\) first"):
            run.execute(Counter.count)

    def test_after_an_error_there_is_a_new_job(self, here: Ray) -> None:
        run = RayExecutor(None, num_hosts=1)
        run.start()
        first = run._job
        with pytest.raises(RemoteError, match="no such sample") as caught:
            run.execute(fail)
        assert caught.value.rank == 0 and isinstance(caught.value.__cause__, KeyError)
        assert run.execute(in_job) == [[0, 1]] and run._job is not first
        run.shutdown()

    def test_what_ray_reports_of_a_worker_is_the_error_of_its_rank(self, here: Ray) -> None:
        run = RayExecutor(num_workers=1)
        run.start()
        here.made[0].failing["attempt"] = LOST
        with pytest.raises(RemoteError) as caught:
            run.execute(in_job)
        assert caught.value.rank == 0 and isinstance(caught.value.__cause__, LOST)
        run.shutdown()

    @pytest.mark.parametrize(("problem", "words"), [(LOST, "has ended"), (LATE, "has not answered for 7 s")])
    def test_a_worker_that_cannot_enter_the_job_is_named(self, here: Ray, problem: type, words: str) -> None:
        run = RayExecutor(RayExecutor.create_settings(timeout_s=7), num_workers=1)
        here.failing = {"enter": problem}
        with pytest.raises(RemoteError, match=f"worker of rank 0 on .* {words}") as caught:
            run.start()
        assert caught.value.rank == 0
        assert here.killed == here.made and len(here.removed) == 1, "a start that fails leaves nothing"

    def test_arguments_that_do_not_fit(self) -> None:
        for numbers in ({}, {"num_workers": 1, "num_hosts": 1}, {"num_workers": 0},
                        {"num_workers": 1, "gpus_per_worker": 1},
                        {"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0}):  # fmt: skip
            with pytest.raises(ConfigError):
                RayExecutor(None, **numbers)
        for elastic in ("min_workers", "max_workers", "reset_limit", "cooldown_range"):
            with pytest.raises(NotOfferedError, match=f"{elastic}: elastic jobs on Ray are not offered"):
                RayExecutor(None, num_workers=1, **{elastic: 1})
        assert RayExecutor(None, num_hosts=2, num_workers_per_host=3, use_gpu=True)._gpus == 1


def test_the_settings_of_a_job() -> None:
    own = Settings(start_timeout_s=3.0)
    assert job_settings(own) is own
    given = RayExecutor.create_settings(timeout_s=9, nics=["eth0", "eth1"])
    assert (job_settings(given).start_timeout_s, job_settings(given).iface) == (9.0, "eth0,eth1")
    assert job_settings(None) == Settings.from_environment()


def test_a_name_that_the_package_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'ringcomm.ray' has no attribute 'Trainer'"):
        ringcomm.ray.Trainer  # noqa: B018
