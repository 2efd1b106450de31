"""Draws docs/machines.svg from results in this repository (needs matplotlib).

``machines.svg`` has what several machines need: the time of a training step on slow links (results of
steps.py), and with unequal machines (unequal.py), and how long training stands still when one of them
dies (lost_host.py), each beside what others do.
``tables.py --pictures`` draws it.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Dict

from cells import time_text

HERE = Path(__file__).resolve().parent
MACHINES = HERE.parent / "docs" / "machines.svg"
STEPS = {"DDP, Gloo": "PyTorch DDP over Gloo", "ringcomm float32": "ringcomm",
         "ringcomm int8": "--compress auto (int8)",
         "ringcomm LocalSGD 16, int8": "LocalSGD, 16 steps"}  # fmt: skip
"""What steps.py measures, and how the picture names it."""
RATES = {1000: "1 Gbit/s", 100: "100 Mbit/s"}
LOST = {"torchrun": "torchrun, Gloo", "ringcomm": "ringcomm"}
"""What lost_host.py measures, and how the picture names it."""
TERMS = (
    "int8: gradients are sent in a quarter of the bytes.\n"
    "LocalSGD, 16 steps: each machine trains alone for 16 steps, then weights are averaged (int8).\n"
    "balanced batches: a faster machine takes more of the data. torchrun: its agents restart the others;\n"
    "in {unfinished} of {jobs} jobs training had not gone on after {limit_s:.0f} s."
)
"""What the words in machines.svg mean."""
GREY, RED = "#9aa5b1", "#d1495b"


def seconds_on_machines(folder: Path) -> Dict[str, Dict[str, float]]:
    """The numbers of machines.svg: by the title of a panel and the name of a bar, medians in seconds."""
    names = ("steps", "unequal", "lost_host")
    measured = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    panels: Dict[str, Dict[str, float]] = {}
    runs = {run["mbit_per_s"]: run["steps"] for run in measured["steps"]}
    for rate, name in RATES.items():
        panels[f"a training step on 3 machines,\n{name}, 25 million weights"] = {
            label: statistics.median(runs[rate][measurement]) for measurement, label in STEPS.items()
        }
    unequal = measured["unequal"]["hosts"]["median_s"]
    panels["a training step on 3 machines,\ntwo of them a third as fast"] = unequal
    lost = measured["lost_host"]["seconds"]
    panels["one of 3 machines dies:\nuntil the others go on training"] = {
        label: statistics.median(math.inf if each is None else each for each in lost[name])
        for name, label in LOST.items()
    }
    return panels


def terms(folder: Path) -> str:
    """The words below machines.svg, with what no bar can show."""
    lost = json.loads((folder / "lost_host.json").read_text())
    times = lost["seconds"]["torchrun"]
    return TERMS.format(unfinished=times.count(None), jobs=len(times), limit_s=lost["limit_s"])


def draw_machines(panels: Dict[str, Dict[str, float]], words: str, picture: Path) -> None:
    """A panel of horizontal bars for each question. Colours and words are explained in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    matplotlib.rcParams.update({"svg.hashsalt": "ringcomm", "font.size": 9, "axes.spines.top": False,
                                "axes.spines.right": False, "axes.spines.bottom": False})  # fmt: skip
    figure, places = pyplot.subplots(2, 2, figsize=(7.2, 4.6))
    for panel, (title, bars) in zip(places.flat, panels.items()):
        for place, (name, seconds) in enumerate(bars.items()):
            peer = "Gloo" in name or name in ("fast one alone", "equal batches")
            panel.barh(-place, seconds, color=GREY if peer else RED, height=0.7)
            panel.text(seconds, -place, f" {time_text(seconds)}", va="center")
        panel.set_yticks([-place for place in range(len(bars))], list(bars))
        panel.set_xticks([])
        panel.set_xlim(0, 1.35 * max(bars.values()))
        panel.set_title(title, fontsize=9, loc="left")
    legend = [Patch(color=GREY, label="without what ringcomm adds"),
              Patch(color=RED, label="ringcomm")]  # fmt: skip
    figure.legend(handles=legend, loc="upper left", ncols=2, frameon=False, fontsize=9)
    figure.text(0.99, 0.965, "seconds, shorter is better", ha="right", va="center", fontsize=9)
    figure.text(0.01, 0.01, words, ha="left", fontsize=9)
    figure.tight_layout(rect=(0, 0.14, 1, 0.94))
    figure.savefig(picture, metadata={"Date": None})
