"""``ringrun --predict`` in a rank: records steps, predicts together with all ranks, and ends the program."""

from __future__ import annotations

import threading
from typing import Any, List, Tuple

import numpy as np

from ..clock import monotonic
from ..collective.codec_rates import CODECS, measured_rates
from ..configuration.polling import waited_for_cores_s
from ..schedule.calibration import Calibration, model_of
from ..schedule.machine import Machine, link_byte_s, machine_of
from ..storage.files import open_named
from .prediction import PredictedRow, Prediction, predictions
from .recorder import Measured, StepRecorder, description, doubt, missing, workload_of

_TOPIC, _NO_TOPIC = "predict", "no prediction"


def attach(context: Any) -> JobPrediction:
    """Begin to record, at the start of a rank with ``RINGCOMM_PREDICT``."""
    return JobPrediction(context)


class JobPrediction:
    """Takes the reductions of a job until they can be predicted.

    Args:
        context: of this rank, a :class:`~ringcomm.job.context.Context`.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._done = False
        self._began_s, self._waited_s = monotonic(), waited_for_cores_s()
        self._recorder = StepRecorder(lambda: context.waited_s, self._finish)
        context.group.runner.on_reduction = context.engine.on_reduction = self._recorder.requested

    def _finish(self, own: Measured) -> None:
        """All ranks come here before the same reduction."""
        context, settings = self._context, self._context.settings
        self._done = True
        waited = (waited_for_cores_s() - self._waited_s) / max(monotonic() - self._began_s, 1e-9)
        rates = measured_rates()
        coding = [rates[name].encode_byte_s + 2 * rates[name].decode_byte_s for name in CODECS]
        row = np.array([own.compute_s, min(1.0, max(0.0, waited)), *coding], np.float64)
        problem = ""
        rows = context.engine.allgather([row], [(1, row.size)], "ringcomm.predict").wait()[0]
        if context.rank == 0:
            table = np.asarray(rows).reshape(context.size, row.size)
            compute_s: List[float] = table[:, 0].tolist()
            coding_byte_s = dict(zip(CODECS, table[:, 2:].max(axis=0).tolist()))
            machine, link = self._machine()
            numbers = [peer.host_index for peer in context.peers]
            slots = [numbers.count(host) for host in sorted(set(numbers))]
            ranks = [int(part) for part in settings.predict_ranks.split(",")]
            price = settings.predict_price or None
            work = workload_of(own, compute_s, settings.fusion_bytes)
            found = predictions(
                work, machine, ranks, slots, settings.predict_batch, price, coding_byte_s=coding_byte_s
            )
            hosts = [peer.host for peer in context.peers]
            here = predictions(
                work, self._measured_machine(), [context.size], slots, coding_byte_s=coding_byte_s
            )
            expected_s = self._as_run(here).step_s
            first, bound = doubt(own, compute_s, table[:, 1].tolist(), hosts, expected_s)
            found = found._replace(bound=bound)
            lines = [*([first] if first else []), description(own, compute_s, hosts, expected_s)]
            lines += [f"predicted {link}:", found.table()]
            if price and not settings.predict_batch:
                lines.append("costs are those of a million samples: --price needs --batch")
            problem = _draw(found, settings.predict_figure)
            context.announce(_TOPIC, "\n".join([*lines, problem] if problem else lines))
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(1 if problem else 0)

    def _as_run(self, found: Prediction) -> PredictedRow:
        """The row of how this job reduces gradients: as ringcomm chooses, or with the job's compression."""
        wanted = f", {self._context.settings.compression}"
        return next((row for row in found.rows if row.method.endswith(wanted)), found.rows[0])

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
            self._context.announce(_NO_TOPIC, missing(self._recorder.seen))


def _draw(found: Prediction, path: str) -> str:
    """Write the figure if there is to be one; why it cannot be written, or nothing."""
    try:
        if path:
            with open(open_named(path), "w", encoding="utf-8") as file:
                file.write(found.svg())
    except OSError as problem:
        return f"the figure {path} cannot be written: {problem.strerror}"
    return ""
