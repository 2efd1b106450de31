"""Jobs on a real Ray of this machine: RayExecutor."""

from __future__ import annotations

import functions
import ray
from functions import error_of, write

import ringcomm as rc
from ringcomm.ray import RayExecutor


class Counter:
    """Counts, and is in the job from the start."""

    def __init__(self, start: int, step: int = 1) -> None:
        rc.init()
        self.value, self.step = start + rc.rank(), step

    def count(self) -> int:
        """The next number."""
        self.value += self.step
        return self.value


class Unfit:
    """Cannot be made on rank 1."""

    def __init__(self) -> None:
        rc.init()
        if rc.rank() == 1:
            raise ValueError("unfit")
        rc.barrier()


def runs(facts: dict) -> None:
    """Functions, an error, a lost worker."""
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=3)
    executor.start(extra_env_vars={"COLOUR": "blue"})
    facts["first"] = executor.run(functions.describe, args=[1.0])
    facts["second"] = executor.run(functions.describe, kwargs={"factor": 1.0})
    facts["environment"] = executor.run(functions.environment, ["COLOUR"])
    facts["failed"] = error_of(lambda: executor.run(functions.fail))
    facts["after_failure"] = executor.run(functions.describe, [1.0])
    facts["died"] = error_of(lambda: executor.run(functions.die))
    facts["without_worker"] = error_of(lambda: executor.run(functions.describe, [1.0]))
    executor.shutdown()
    facts["not_started"] = error_of(lambda: executor.run(functions.describe, [1.0]))


def objects_and_two_jobs(facts: dict) -> None:
    """Objects that stay on the workers, and two jobs at once."""
    counting = RayExecutor(None, num_hosts=1, num_workers_per_host=2)
    counting.start(Counter, executable_args=[10], executable_kwargs={"step": 5})
    other = RayExecutor(num_workers=2)
    other.start()
    facts["twice"] = error_of(other.start)
    facts["callbacks"] = error_of(lambda: other.run(functions.describe, [1.0], callbacks=[print]))
    pairs = (counting, 1.0), (other, 10.0)
    started = [executor.run_remote(functions.describe, [factor]) for executor, factor in pairs]
    facts["two_jobs"] = [ray.get(references) for references in started]
    facts["counted"] = [counting.execute(Counter.count) for _ in range(2)]
    facts["counted_once"] = counting.execute_single(lambda counter: counter.count())
    other.shutdown()
    with_gpus = RayExecutor(num_workers=2, use_gpu=True)
    with_gpus.start()
    facts["gpus"] = with_gpus.run(functions.environment, ["CUDA_VISIBLE_DEVICES"])
    with_gpus.shutdown()
    facts["unfit"] = error_of(lambda: counting.start_executables(Unfit))
    counting.shutdown()


def main() -> None:
    options = {"include_dashboard": False, "object_store_memory": 80_000_000, "log_to_driver": False}
    ray.init("local", num_cpus=4, num_gpus=2, **options)
    facts: dict = {}
    runs(facts)
    objects_and_two_jobs(facts)
    facts["free"] = ray.cluster_resources()["CPU"]
    small = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=9)
    facts["no_room"] = error_of(small.start)
    ray.shutdown()
    write(facts)


if __name__ == "__main__":
    main()
