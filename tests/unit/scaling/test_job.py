"""``ringrun --predict`` in a rank: what the ranks exchange, what is shown, and how the program ends."""

from __future__ import annotations

import os
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from ringcomm.scaling import job as module
from ringcomm.scaling.job import attach
from ringcomm.scaling.recorder import STEPS, WARM_UP, StepRecorder
from ringcomm.schedule.cost import CostModel

MEASURED = CostModel(1e-5, 1e-9, 1e-10, hosts=(0, 1), wire_latency_s=1e-4, wire_byte_s=(2e-8, 1e-8))


class Job:
    """What a prediction uses of a context; the other rank computes as long as this one, times ``slower``."""

    def __init__(self, rank=0, slower=1.0, cost_model=None, in_vain_s=0.0, **settings):
        self.in_vain_s = in_vain_s
        self.rank, self.size = rank, 2
        self.waited_s = self.now_s = 0.0
        self.cost_model = cost_model
        self.peers = [SimpleNamespace(host=f"host{host}", host_index=host) for host in range(2)]
        self.settings = SimpleNamespace(**{
            "predict_ranks": "2,4", "predict_batch": 32, "predict_price": 0.0, "predict_figure": "",
            "predict_link": "", "fusion_bytes": 1 << 20, "compression": "", **settings,
        })  # fmt: skip
        self.group = SimpleNamespace(runner=SimpleNamespace(on_reduction=None))
        self.engine = SimpleNamespace(on_reduction=None, allgather=self._allgather)
        self.slower = slower
        self.exchanged = []
        self.shown = []

    def _allgather(self, arrays, shapes, name):
        ((row,), [shape]) = arrays, shapes
        self.exchanged.append((name, shape, row.tolist()))
        other = row * [self.slower, 1.0, 1.0, 1.0]
        return SimpleNamespace(wait=lambda: [np.stack([row, other])])

    def announce(self, topic, text):
        self.shown.append((topic, text))

    def step(self):
        """Compute for a tenth of a second, and reduce two gradients."""
        self.now_s += 0.1
        self.now_s += self.in_vain_s
        self.waited_s += self.in_vain_s
        self.engine.on_reduction(4_000_000, False, "first")
        self.group.runner.on_reduction(1_000_000, False, "second")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Lets recorders use the clock of the job whose waiting they ask for."""

    def recorder(waited_s, finished):
        job = finished.__self__._context
        return StepRecorder(waited_s, finished, lambda: job.now_s)

    monkeypatch.setattr(module, "StepRecorder", recorder)


def predicted(job):
    """Steps until the prediction ends the program; the prediction."""
    made = attach(job)
    with pytest.raises(SystemExit) as ended:
        for _ in range(10 * (WARM_UP + STEPS)):
            job.step()
    assert ended.value.code == 0
    return made


def test_rank_0_shows_what_was_measured_and_predicted():
    job = Job(slower=2.0, predict_link="100mbit", predict_price=3.0)
    made = predicted(job)
    ((name, shape, row),) = job.exchanged
    assert (name, shape, row[0]) == ("ringcomm.predict", (1, 4), pytest.approx(0.1))
    ((topic, text),) = job.shown
    assert topic == "predict" and "2 reductions of 5 MB together" in text
    assert "rank 1 on host1 needs 0.2 s" in text and "predicted for interfaces of 100mbit:" in text
    head, *rows = text.partition("100mbit:\n")[2].splitlines()
    assert head.startswith("ranks hosts") and "cost/1M" in head
    assert [line[:5].strip() for line in rows if line[:5].strip()] == ["2", "4"]
    job.step()  # by a thread that goes on
    made.close()
    assert len(job.exchanged) == len(job.shown) == 1


def test_a_model_that_is_far_off_says_so_first_and_gives_bounds():
    """The job as it runs takes far longer than the links and the computation explain."""
    job = Job(in_vain_s=0.4, cost_model=MEASURED)
    predicted(job)
    first, second, *_, last = job.shown[0][1].splitlines()
    assert first.startswith("the model is ") and "measured 0.5 s" in first
    assert first.endswith("So the rows below are bounds: steps take at least as long")
    assert second.startswith("measured a step of 0.5 s (the model says")
    assert "≥" in last and last.count("≤") == 2


def test_a_job_with_compression_is_compared_with_that():
    texts = []
    for compression in ("", "int8"):
        job = Job(cost_model=MEASURED, compression=compression, in_vain_s=0.05)
        predicted(job)
        texts.append(job.shown[0][1].partition("(the model says ")[2].split()[0])
    assert float(texts[1]) < float(texts[0])


def test_the_other_ranks_take_part_and_end_without_a_word():
    job = Job(rank=1)
    predicted(job).close()
    assert len(job.exchanged) == 1 and job.shown == []


@pytest.mark.parametrize(
    "model, words",
    [
        (MEASURED, "for the hosts' interfaces as measured (800, 400 Mbit/s)"),
        (None, "which is assumed: name another with --link"),
        (MEASURED._replace(hosts=()), "which is assumed: name another with --link"),
    ],
    ids=["measured", "nothing", "one host"],
)
def test_the_links_are_the_measured_ones_if_there_are_any(model, words):
    job = Job(cost_model=model)
    predicted(job)
    assert words in job.shown[0][1]


def test_a_figure(tmp_path):
    path = tmp_path / "figure.svg"
    predicted(Job(predict_figure=str(path)))
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_figure_that_cannot_be_written(tmp_path):
    job = Job(predict_figure=str(tmp_path / "nowhere" / "figure.svg"))
    attach(job)
    with pytest.raises(SystemExit) as ended:
        for _ in range(10 * (WARM_UP + STEPS)):
            job.step()
    assert ended.value.code == 1
    (_, text), = job.shown
    assert "ring" in text and "figure.svg cannot be written: No such file" in text


def test_in_another_thread_than_the_main_one_the_program_goes_on(monkeypatch):
    threads = SimpleNamespace(current_thread=lambda: "worker", main_thread=lambda: "main")
    monkeypatch.setattr(module, "threading", threads)
    job = Job()
    made = attach(job)
    for _ in range(10 * (WARM_UP + STEPS)):
        job.step()
    made.close()
    assert len(job.exchanged) == len(job.shown) == 1


@pytest.mark.parametrize("steps, words", [(0, "reduced no gradients"), (3, "ended after 6 reductions.")])
def test_a_program_that_ends_too_early_is_told_why(steps, words):
    for rank in (0, 1):
        job = Job(rank=rank)
        made = attach(job)
        for _ in range(steps):
            job.step()
        made.close()
        assert [topic for topic, text in job.shown if words in text] == ["no prediction"] * (rank == 0)
        assert job.exchanged == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_figure_follows_no_link_of_another_user(tmp_path):
    precious, figure = tmp_path / "precious", tmp_path / "figure.svg"
    precious.write_text("keep")
    figure.symlink_to(precious)
    os.chown(figure, 12345, 12345, follow_symlinks=False)
    assert "belongs to another user" in module._draw(SimpleNamespace(svg=lambda: "<svg/>"), str(figure))
    assert precious.read_text() == "keep"
