"""The live view and the report: the slowest rank is marked, and names from elsewhere do no harm."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import List

from ringrun.show import views
from ringrun.show.history import History
from ringrun.show.views import ReportFacts, html_report
from ringrun.show.visible import columns
from tests.unit.ringrun.show.samples import HOSTS, SLOW_2, report, running


def test_a_line_for_each_rank_and_the_slowest_marked():
    lines = views.table(SLOW_2, HOSTS, 20.0, False, False, 24)
    assert lines[0].split() == ["rank", "host", "step", "steps/s", "sent", "MB/s", "waits", "in"]
    assert [line[0] for line in lines[1:4]] == [" ", " ", ">"]
    assert lines[3].split() == [">", "2", "jetson2", "40", "2", "2", "10", "%", "its", "own", "code"]
    assert lines[4:] == ["rank 2 (jetson2) is the slowest: the others wait for it 70 % of the time"]


def test_a_low_terminal_leaves_ranks_out():
    lines = views.table(SLOW_2, HOSTS, 20.0, False, True, 6)
    assert len(lines) == 6 and lines[3] == "  and 1 more ranks"


def test_names_cannot_control_the_terminal_or_break_the_table():
    history = History(0.0)
    history.take(0, report(0, 1.0, doing="日本\t\n\u202e", inside=True), 1.0)
    history.take(1, report(1, 1.0, doing="x", inside=True), 1.0)
    lines = views.table(history, {0: "\x1b[2J\n日本", 1: "a"}, 1.0, False, False, 24)
    assert len(lines) == 3 and not set("\x1b\n\t\u202e") & set("".join(lines))
    assert columns(lines[1].split("  日本\\t")[0]) == len(lines[2]) - len("  x")
    assert "\x1b" not in views.slowest_text(SLOW_2.slowest(HOSTS, now=True), SLOW_2, {2: "\x1b[2J"})


FACTS = ReportFacts("train.py", "0.1.0", 1.7e9, 75.0, "done")
_VOID = ("meta",)


class Checker(HTMLParser):
    """Checks that every element is closed, and collects text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: List[str] = []
        self.tags: List[str] = []
        self.links: List[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in _VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += f" {data}"


def page_of(history: History, facts: ReportFacts = FACTS) -> str:
    return html_report(facts, history, HOSTS)


def test_the_slow_rank_comes_first():
    page = page_of(SLOW_2)
    text = " ".join(Checker(page).text.split())
    assert text.index("Rank 2 (jetson2) is the slowest: the others wait for it 70 % of the time.") < 200
    assert re.search(r"<tr class=slow><td>2</td>", page)
    for title in ("Ranks", "Steps per second", "Waiting between ranks", "Links"):
        assert f"<h2>{title}</h2>" in page, title
    assert "75.0" not in text and "1 min 15 s" in text


def test_it_needs_nothing_else():
    page = page_of(SLOW_2)
    found = Checker(page)
    assert found.links == [] and not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert "http:" not in page and "https:" not in page and "url(" not in page and "@import" not in page


def test_text_from_elsewhere_is_escaped():
    history = running(3, [0.1, 0.1], {})
    bad = "<script>alert(1)</script>\x1b[2J"
    history.take(0, report(0, 4.0, operations={bad: [1, 9.0, 5]}, kinds={bad: [1, 9.0, 5]}), 4.0)
    facts = FACTS._replace(program=bad, failure=bad, changes=((3.0, bad),), settings=((bad, bad, bad),))
    found = Checker(html_report(facts, history, {0: bad, 1: bad}))
    assert "script" not in found.tags and found.text.count("<script>alert(1)</script>") >= 6
    assert "\x1b" not in found.text


def test_after_a_change_of_the_ranks_each_rank_has_one_row():
    history = running(5, [0.5, 0.5], {})
    history.changed([0, 2])
    history.take(0, report(0, 1.0, generation=1), 7.0)
    history.take(2, report(1, 1.0, generation=1), 7.0)
    page = page_of(history, FACTS._replace(changes=((6.0, "jetson1 has left"),)))
    ranks = page.partition("<h2>Ranks</h2>")[2].partition("</table>")[0]
    assert "train.py on 2 ranks" in page and ranks.count("<tr>") == 3
    assert "since the last change of the ranks" in page and "jetson2" in ranks and "jetson1" not in ranks
