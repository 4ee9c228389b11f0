"""Tests of the report as a page: complete in itself, and safe with any text of a run."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

from foreshock.api.diagnosis import Diagnosis, MissingData
from foreshock.api.watch import AlertRecord, AlertState
from foreshock.commands.queries import Curve
from foreshock.commands.report_page import render_page
from tests.foreshock.commands.test_report_text import mixed_report, report


class _Elements(HTMLParser):
    """Collects the elements and what they would load."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "srcset", "data") or tag == "link"]
        if tag not in ("meta", "line", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def elements_of(page: str) -> _Elements:
    """Parse a page."""
    elements = _Elements()
    elements.feed(page)
    return elements


def test_page_loads_nothing_and_runs_nothing() -> None:
    elements = elements_of(render_page(report()))
    assert elements.loaded == []
    assert "script" not in elements.names
    assert "svg" in elements.names


def alert(rule: str, state: AlertState) -> AlertRecord:
    """Return an alert of step 12."""
    return AlertRecord(
        id=rule, attempt=1, changed_by="detector", opened_at_us=0, changed_at_us=0,
        rule=rule, step=12, severity="critical", state=state, value=0.5, threshold=0.1, why="Why it fired.",
        what_to_do="What to do: `foreshock probe`.",
    )  # fmt: skip


def test_page_has_verdict_curves_alerts_and_the_text() -> None:
    found = Diagnosis(
        verdict="critical",
        headline="Critical since step 12: the mismatch is large.",
        missing=(MissingData(sentence="no reward is logged"),),
    )
    page = render_page(report(diagnosis=found, alerts=(alert("k3_range", "open"), alert("taken_back", "retracted"))))
    assert (
        f'<div class="verdict critical">{found.headline}</div><h2>Missing</h2><ul><li>No reward is logged.</li>' in page
    )
    assert "Mismatch: k3 per token" in page
    assert "Response length" in page
    assert "k3_range, step 12, open, value 0.500" in page
    assert "<code>foreshock probe</code>" in page
    assert 'class="mark critical"' in page
    assert "taken_back" not in page
    assert "Alerts ──" in page  # a title of the text


def test_thresholds_are_of_the_line_at_lag_zero() -> None:
    page = render_page(mixed_report(model_kind="moe"))
    assert '<b class="key-1">all lags</b>, <b class="key-2">lag 0</b>, for which the thresholds hold' in page
    assert "warning above 0.0100 at lag 0" in page
    assert "The ranges shown are those of a mixture of experts" in page
    assert "at lag 0" not in render_page(report()).partition("<pre>")[0]


def test_names_of_a_run_are_text_and_never_markup() -> None:
    run = dataclasses.replace(report().run, name="<script>alert(1)</script>", model='"><img src=x>')
    page = render_page(report(run=run, url='http://service/runs/"onmouseover=1'))
    elements = elements_of(page)
    assert "script" not in elements.names
    assert "img" not in elements.names
    assert 'href="http://service/runs/&quot;onmouseover=1"' in page


def test_run_without_steps_says_so() -> None:
    empty = Curve("trainer/rollout", (), {})
    page = render_page(report(mismatch=empty, rollouts=empty, alerts=(), attributions=()))
    assert "No step is complete yet." in page
    assert "No alert has fired." in page
