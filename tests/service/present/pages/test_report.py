"""Tests of the pages as text, which `foreshock report` prints."""

from __future__ import annotations

import pytest

from foreshock.api.diagnosis import Diagnosis, DiagnosisEvent
from foreshock.commands.text import WIDTH
from foreshock_service.present.pages.presenters import report
from foreshock_service.present.pages.presenters.report import SCREEN_LINES
from tests.service.present.pages.conftest import STEPS, Fleet, Site
from tests.service.present.pages.fleet import KINDS


def lines_of(site: Site | Fleet, run_id: str, **query: object) -> list[str]:
    answer = site.http.get(f"/pages/runs/{run_id}/text", params={name: str(value) for name, value in query.items()})
    assert answer.raise_for_status().headers["content-type"] == "text/plain; charset=utf-8"
    return answer.text.splitlines()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("query", [{}, {"whole": "true"}])
def test_report_of_every_kind_of_run_says_its_diagnosis_within_its_width(
    fleet: Fleet, name: str, query: dict[str, object]
) -> None:
    found = fleet.get(name, "diagnosis")
    lines = lines_of(fleet, fleet.ids[name], **query)
    assert found["headline"] in lines
    assert not [line for line in lines if "None" in line]
    assert not [line for line in lines if len(line) > WIDTH + 30 and line != found["headline"]]
    assert lines[-1] == f"Pages: {fleet.url}{fleet.address(name)}"
    assert query or len(lines) <= SCREEN_LINES


def test_whole_report_has_every_figure_of_the_page(site: Site) -> None:
    text = "\n".join(lines_of(site, site.replayed.id, whole="true"))
    titles = (
        "Mismatch per token (k3)", "Response length", "Learning-rate scale", "Where the mismatch comes from, step 3",
        "Mismatch by token probability", "Alerts",
    )  # fmt: skip
    for title in titles:
        assert f"\n{title} ─" in text
    assert "Tails and effective sample size ─" in text
    for link in ("vllm.prefill/rollout", "torch.trainer/vllm.prefill", "trainer/torch.trainer", "trainer/rollout"):
        assert f"\n  {link} " in text
    page = site.http.get(f"/pages/runs/{site.replayed.id}/figures/length.json").json()
    assert page["summary"].split(".")[0] in " ".join(text.split())


def test_report_of_a_step_has_its_measures_and_buckets(site: Site) -> None:
    lines = lines_of(site, site.run.id, step=STEPS)
    text = "\n".join(lines)
    assert f"Measures of trainer/rollout, step {STEPS} ─" in text
    (k3,) = [line for line in lines if line.startswith("  k3_kl  ")]
    assert "range: " in k3
    assert "Nothing has been replayed yet." in text
    (header,) = [line for line in lines if "probability under rollout" in line and "tokens" in line]
    assert header.split()[-4:] == ["|d|", "largest", "|d|", "tokens"]
    assert lines[-1].endswith(f"/steps/{STEPS}")
    missing = site.http.get(f"/pages/runs/{site.run.id}/text", params={"step": STEPS + 1})
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:foreshock:problem:step-not-found")


def test_screen_counts_the_sentences_that_it_leaves_out() -> None:
    event = DiagnosisEvent(
        step=7, onset=5, rule="mismatch_rise", severity="critical", sentence="Step 7: k3 rose.", is_open=True
    )
    found = Diagnosis(verdict="critical", since=7, headline="Critical since step 7.", events=(event,) * 5)
    for most in (1, 3):
        lines = report._diagnosis(found, most)
        assert lines[0] == found.headline
        assert lines.count("    · Step 7: k3 rose.") == most
        assert lines[-1].strip() == f"and {5 - most} more"


def test_report_counts_the_logged_steps_without_the_advised_rate(site: Site) -> None:
    (counted,) = (line for line in lines_of(site, site.run.id) if " rollouts, " in line)
    assert counted.startswith(f"  {STEPS} steps (1 to {STEPS}), ")
