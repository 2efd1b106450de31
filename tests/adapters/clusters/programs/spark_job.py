"""Jobs on a real Spark in local mode."""

from __future__ import annotations

import threading

import functions
from functions import error_of, write
from pyspark import SparkConf, SparkContext

import ringcomm.spark


def main() -> None:
    facts: dict = {"no_context": error_of(lambda: ringcomm.spark.run(functions.describe, (1.0,)))}
    conf = SparkConf().setMaster("local[4]").set("spark.ui.enabled", "false")
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        conf = conf.set(name, "127.0.0.1")
    context = SparkContext(conf=conf)
    facts["first"] = ringcomm.spark.run(functions.describe, (1.0,), num_proc=2)
    facts["second"] = ringcomm.spark.run(functions.describe, kwargs={"factor": 1.0}, num_proc=2)
    facts["environment"] = ringcomm.spark.run(functions.environment, ("COLOUR",), env={"COLOUR": "blue"})
    found: dict = {}
    threads = [
        threading.Thread(
            target=lambda factor=factor: found.update(
                {factor: ringcomm.spark.run(functions.describe, (factor,), num_proc=2)}
            )
        )
        for factor in (1.0, 10.0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facts["two_jobs"] = [found[1.0], found[10.0]]
    facts["failed"] = error_of(lambda: ringcomm.spark.run(functions.fail, num_proc=2))
    facts["died"] = error_of(lambda: ringcomm.spark.run(functions.die, num_proc=3))
    facts["no_room"] = error_of(
        lambda: ringcomm.spark.run(functions.describe, (1.0,), num_proc=9, start_timeout=2)
    )
    facts["after"] = ringcomm.spark.run(functions.describe, (1.0,), num_proc=2)
    facts["stdout"] = error_of(lambda: ringcomm.spark.run(functions.describe, (1.0,), stdout=print))
    context.stop()
    write(facts)


if __name__ == "__main__":
    main()
