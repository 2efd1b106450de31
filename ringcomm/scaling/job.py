"""``ringrun --predict`` in a rank: records steps, predicts together with all ranks, and ends the program."""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Tuple

import numpy as np

from ..files import open_named
from ..schedule.calibration import Calibration, model_of
from .machine import Machine, link_byte_s, machine_of
from .prediction import Prediction, predictions
from .recorder import Measured, StepRecorder, description, missing, workload_of

_TOPIC, _NO_TOPIC = "predict", "no prediction"


class JobPrediction:
    """Takes the reductions of a job until they can be predicted.

    Args:
        context: of this rank.
        announce: shows a text to the user, given the context, a topic and the text.
    """

    def __init__(self, context: Any, announce: Callable[[Any, str, str], None]) -> None:
        self._context = context
        self._announce = announce
        self._done = False
        self._recorder = StepRecorder(lambda: context.waited_s, self._finish)
        context._runner.on_reduction = context.engine.on_reduction = self._recorder.requested

    def _finish(self, own: Measured) -> None:
        """All ranks come here before the same reduction."""
        context, settings = self._context, self._context.settings
        self._done = True
        row = np.array([own.compute_s], np.float64)
        problem = ""
        rows = context.engine.allgather([row], [(1, 1)], "ringcomm.predict").wait()[0]
        if context.rank == 0:
            compute_s: List[float] = [float(value) for value in np.asarray(rows).reshape(-1)]
            machine, link = self._machine()
            numbers = [peer.host_index for peer in context.peers]
            slots = [numbers.count(host) for host in sorted(set(numbers))]
            ranks = [int(part) for part in settings.predict_ranks.split(",")]
            price = settings.predict_price or None
            work = workload_of(own, compute_s, settings.fusion_bytes)
            found = predictions(work, machine, ranks, slots, settings.predict_batch, price)
            hosts = [peer.host for peer in context.peers]
            here = predictions(work, self._measured_machine(), [context.size], slots).rows[0]
            lines = [description(own, compute_s, hosts, here.step_s), f"predicted {link}:", found.table()]
            if price and not settings.predict_batch:
                lines.append("costs are those of a million samples: --price needs --batch")
            problem = _draw(found, settings.predict_figure)
            self._announce(context, _TOPIC, "\n".join([*lines, problem] if problem else lines))
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(1 if problem else 0)

    def _measured_machine(self) -> Machine:
        """The model of the links as they were calibrated."""
        context = self._context
        numbers = [peer.host_index for peer in context.peers]
        return machine_of(context.cost_model or model_of([Calibration()] * context.size, numbers))

    def _machine(self) -> Tuple[Machine, str]:
        """The model of the links to predict for, and its source."""
        context, asked = self._context, self._context.settings.predict_link
        machine = self._measured_machine()
        if asked:
            return machine._replace(wire_byte_s=(link_byte_s(asked),)), f"for interfaces of {asked}"
        speeds = ", ".join(f"{8e-6 / byte_s:.0f}" for byte_s in sorted(set(machine.wire_byte_s)))
        if context.cost_model is None or not context.cost_model.hosts:
            return machine, f"for interfaces of {speeds} Mbit/s, which is assumed: name another with --link"
        return machine, f"for the hosts' interfaces as measured ({speeds} Mbit/s)"

    def close(self) -> None:
        """The program ends; report why there is no prediction, if there is none."""
        if not self._done and self._context.rank == 0:
            self._announce(self._context, _NO_TOPIC, missing(self._recorder.seen))


def _draw(found: Prediction, path: str) -> str:
    """Write the figure if there is to be one; why it cannot be written, or nothing."""
    try:
        if path:
            with open(open_named(path), "w", encoding="utf-8") as file:
                file.write(found.svg())
    except OSError as problem:
        return f"the figure {path} cannot be written: {problem.strerror}"
    return ""
