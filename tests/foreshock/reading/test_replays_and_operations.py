"""Both readers against the real service: replays, rules, retention, deletions, the service itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

import foreshock
from foreshock.api.doctor import DoctorReport, Finding, NotTried
from foreshock.api.records import to_json
from foreshock.diagnosis.default_rules import default_rules
from foreshock.errors import Rejected, RunNotFound
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.probe_kinds import DOCTOR
from foreshock.reading.reader import AsyncReader, Reader
from foreshock.scorers import REFERENCE, default_scorers
from tests.foreshock.running_service import RunningService
from tests.foreshock.twins import KINDS, opener
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import (
    EVERYTHING,
    LeaseHolder,
    announce_checkpoint,
    ask_for_lease,
    ask_for_probe,
    noisy,
    scores_of,
)

STEP = 20
RULES = "version = 1\neffective_from_step = 40\n\n[rules.entropy_fall]\nenabled = false\n"


@pytest.fixture(scope="module")
def run(real_service: RunningService) -> Iterator[Sender]:
    """A run with a replay and an examination of one step."""
    with httpx.Client(base_url=real_service.url, timeout=60) as http:
        sender = start_run(http, "my-run")
        sender.put_shard(STEP, make_batch(24)).raise_for_status()
        for step in (1, STEP):
            announce_checkpoint(sender, step, f"sha256:{step:064x}")
        ask_for_probe(sender, STEP, (REFERENCE,)).raise_for_status()
        ask_for_probe(sender, STEP, (), kind=DOCTOR.name).raise_for_status()
        while (answer := ask_for_lease(http, scorers=(*EVERYTHING, DOCTOR.capability))).status_code == 200:
            _work(LeaseHolder(http, answer.json()))
        yield sender


def _work(holder: LeaseHolder) -> None:
    rollouts, job = holder.rollouts(), holder.lease["job"]
    if job["kind"] == DOCTOR.name:
        found = Finding("unknown", "rollout", "unknown", "", "no variant", 1, 1)
        report = DoctorReport(24, rollouts.num_tokens, (found,), (), (), (NotTried("step 1", "gone"),), 3, 1.5, "spent")
        headers = {"X-Foreshock-Lease-Token": str(holder.token)}
        holder.http.put(f"{holder.url}/doctor", json=to_json(report), headers=headers).raise_for_status()
    for each in job["scorers"] if job["kind"] != DOCTOR.name else ():
        scores = scores_of(rollouts, noisy(rollouts, len(each["scorer"])), engine=each["scorer"].partition(".")[0])
        holder.put_scores(scores, each["scorer"], variant=each["variant"]).raise_for_status()
    holder.complete().raise_for_status()


@pytest.fixture(params=KINDS)
def open_reader(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A function that opens a reader of one kind."""
    with opener(request.param, Reader, AsyncReader) as open_one:
        yield open_one


@pytest.fixture
def reader(run: Sender, real_service: RunningService, open_reader: Callable[..., Any]) -> Any:
    """A reader of all projects."""
    return open_reader(real_service.url)


def test_report_of_the_doctor_on_a_step(reader: Any) -> None:
    read = reader.doctor("my-run", STEP)
    assert (read.step, read.report.ended, read.report.causes) == (STEP, "spent", ())
    assert read.report.not_tried == (NotTried("step 1", "gone"),)
    assert read.report.findings[0].share != read.report.findings[0].share


def test_what_was_not_replayed_is_a_rejection_with_the_details_of_the_service(reader: Any) -> None:
    with pytest.raises(Rejected, match="404") as raised:
        reader.doctor("my-run", STEP + 1)
    assert raised.value.problem["type"].endswith("doctor-not-found")
    assert raised.value.problem["request_id"]
    with pytest.raises(RunNotFound):
        reader.doctor("another-run", STEP)


def test_hardware_has_workers_and_accelerators(reader: Any) -> None:
    hardware = reader.hardware()
    (worker,) = hardware.workers
    assert (worker.name, worker.accelerator, worker.device_name) == ("w1", "cpu", "a CPU")
    assert set(worker.scorers) >= set(EVERYTHING)
    (cpu,) = (each for each in hardware.accelerators if each.accelerator == "cpu")
    assert (cpu.workers, cpu.queued_jobs, cpu.devices) == (1, 0, ("a CPU",))


def test_probe_policy_and_retention_that_were_not_set_are_the_defaults(reader: Any) -> None:
    policy = reader.probe_policy("my-run")
    assert (policy.state, policy.every_steps, policy.on_alerts, policy.changed_at_us) == ("off", None, False, None)
    assert [each.scorer for each in policy.scorers] == list(default_scorers())
    retention = reader.retention("my-run")
    assert (retention.source, retention.last_steps) == ("settings", None)


def test_rules_of_a_run_and_the_defaults(run: Sender, reader: Any) -> None:
    defaults = reader.default_rules(model_kind="moe")
    assert {rule.name for rule in defaults.rules} >= {rule.name for rule in default_rules("moe")}
    assert defaults.model_kind == "moe"
    run.http.put(f"/v1/runs/{run.run}/rules", json={"toml": RULES}).raise_for_status()
    later, before = reader.rules("my-run"), reader.rules("my-run", step=39)
    assert {rule.name for rule in before.rules} - {rule.name for rule in later.rules} == {"entropy_fall"}
    assert (later.versions[-1].effective_from_step, later.versions[-1].toml) == (40, RULES)
    (rule,) = (rule for rule in before.rules if rule.name == "entropy_fall")
    assert rule.key
    assert rule.source


def test_every_page_of_deletions_is_read(
    real_service: RunningService, open_reader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.Client(base_url=real_service.url, timeout=60) as http:
        run = start_run(http, f"deletions-{uuid.uuid4()}")
        asked = [http.post(f"/v1/runs/{run.run}/deletions", json={"sample_ids": [f"{n}", "x"]}) for n in range(5)]
    made = [each.raise_for_status().json()["id"] for each in asked]
    monkeypatch.setattr("foreshock.reading.caller.ITEMS_ON_A_PAGE", 2)
    reader = open_reader(real_service.url)
    deletions = list(reader.deletions(run.run))
    assert [each.id for each in deletions] == made[::-1]
    assert {(each.sample_ids, each.group_ids, each.rollouts) for each in deletions} == {(2, 0, 0)}


def test_release_and_capacity_of_the_service(reader: Any) -> None:
    service = reader.service()
    assert service.version == foreshock.__version__
    assert service.statistics_version == STATISTICS_VERSION
    assert (service.processes, service.upload_places > 0) == (1, True)
