"""Both readers against the real service: findings of a run, and of all runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from foreshock.errors import Rejected, RunNotFound
from foreshock.reading.reader import AsyncReader, Reader
from tests.foreshock.lint.healthy import healthy_batch
from tests.foreshock.running_service import RunningService
from tests.foreshock.twins import KINDS, opener
from tests.service.replay.attribution.test_environments import AVX2, KNOWN, replay, start
from tests.service.sending import Sender, make_batch, start_run


@pytest.fixture(scope="module")
def runs(real_service: RunningService) -> Iterator[tuple[Sender, Sender]]:
    """A run of which an attribution names a cause, then one of another project with two warnings of the lint."""
    with httpx.Client(base_url=real_service.url, timeout=60) as http:
        batch = make_batch(40, attributes=KNOWN)
        caused = start(http, batch, 1)
        assert batch.rollout_log_probs is not None
        assert batch.trainer_log_probs is not None
        replay(caused, {"vllm.prefill": batch.rollout_log_probs, "torch.trainer": batch.trainer_log_probs}, AVX2, 1)
        deadline = time.monotonic() + 120
        # Findings follow in the background: those of the first scores may be there when the second ones are.
        while not is_of_the_newest_attribution(caused):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        linted = start_run(http, "linted", project="elsewhere")
        for step in (2, 4):
            healthy = healthy_batch(step)
            assert healthy.rollout_log_probs is not None
            copied = replace(healthy, trainer_log_probs=healthy.rollout_log_probs.copy())
            linted.put_shard(step, copied).raise_for_status()
        yield caused, linted


def is_of_the_newest_attribution(run: Sender) -> bool:
    """Return whether the attribution of step 1 has the link that the run's finding names."""
    found = {each["name"] for each in run.get("findings", source="attribution").raise_for_status().json()["items"]}
    links = {link["name"] for link in run.get("steps/1/attribution").raise_for_status().json()["links"]}
    return bool(found & links)


@pytest.fixture(params=KINDS)
def open_reader(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A function that opens a reader of one kind."""
    with opener(request.param, Reader, AsyncReader) as open_one:
        yield open_one


@pytest.fixture
def reader(runs: tuple[Sender, Sender], real_service: RunningService, open_reader: Callable[..., Any]) -> Any:
    """A reader of all projects."""
    return open_reader(real_service.url)


def test_warning_of_the_lint_is_a_finding_with_its_steps(runs: tuple[Sender, Sender], reader: Any) -> None:
    (finding,) = reader.findings("linted", sources=["lint"], severities=["critical"])
    (warning,) = reader.lint("linted", 4).warnings
    assert (finding.run, finding.run_key, finding.project) == (runs[1].run, "linted", "elsewhere")
    assert (finding.source, finding.name, finding.title) == ("lint", warning.name, warning.title)
    assert (finding.sentence, finding.remedy) == (warning.seen, warning.remedy)
    assert (finding.steps, finding.first_step, finding.newest_step) == (2, 2, 4)
    assert finding.confidence is None
    assert finding.changed_at_us > 0
    assert list(reader.findings("linted", severities=["info"])) == []


def test_cause_that_an_attribution_names_is_a_finding_with_its_share(runs: tuple[Sender, Sender], reader: Any) -> None:
    (finding,) = reader.findings(runs[0].run, sources=["attribution"])
    (link,) = (link for link in reader.attribution(runs[0].run, 1).links if link.name == finding.name)
    assert (finding.severity, finding.remedy) == ("info", None)
    assert (finding.confidence.share, finding.confidence.low) == (link.share, link.share_low)
    assert finding.confidence.high == link.share_high


def test_findings_of_runs_are_filtered_and_paged(
    runs: tuple[Sender, Sender],
    real_service: RunningService,
    open_reader: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("foreshock.reading.caller.ITEMS_ON_A_PAGE", 1)
    reader = open_reader(real_service.url)
    everything = list(reader.findings_of_runs())
    assert [finding.run for finding in everything[:1]] == [runs[1].run]
    assert {finding.run for finding in everything} == {run.run for run in runs}
    assert [finding.changed_at_us for finding in everything] == sorted(
        (finding.changed_at_us for finding in everything), reverse=True
    )
    (cause,) = reader.findings_of_runs(sources=["attribution"])
    assert list(reader.findings_of_runs(names=[cause.name], severities=["info", "warning"])) == [cause]
    elsewhere = open_reader(real_service.url, "elsewhere")
    assert list(elsewhere.findings_of_runs()) == list(reader.findings("linted"))
    with pytest.raises(Rejected, match="422"):
        list(reader.findings_of_runs(sources=["guess"]))
    with pytest.raises(RunNotFound):
        list(reader.findings("no-such-run"))
