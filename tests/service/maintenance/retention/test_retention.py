"""Retention: tokens of old steps are purged, aggregates stay, and readers say why tokens are missing."""

from dataclasses import replace

import httpx
import pytest
from sqlalchemy import update

from foreshock_service.maintenance.remeasure import check_step, remeasure_step
from foreshock_service.maintenance.retention import purge, purge_all, retention
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Attribution
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.removal import remove_due_files
from foreshock_service.replay.attribution.service import compute_stale_attributions
from foreshock_service.runs.events import StepKey
from tests.service.sending import Sender, make_batch, problem_of, start_run
from tests.service.stored import add_alert, list_files
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, work_off

KEEP_TWO = {"retention_last_steps": 2, "retention_alert_steps": 0}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings whose files go at once: the grace is tested with the deletion of runs."""
    return settings.model_copy(update={"removal_grace_seconds": 0.0, **KEEP_TWO})


def log(http: httpx.Client, steps: int, key: str = "a-run") -> Sender:
    """Log steps 1 to `steps`."""
    sender = start_run(http, key)
    for step in range(1, steps + 1):
        sender.put_shard(step, make_batch(seed=step)).raise_for_status()
    return sender


def steps_with_tokens(settings: Settings) -> set[int]:
    return {int(name.split("/")[2]) for name in list_files(settings)}


def test_purge_keeps_last_steps_and_those_by_alerts(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = log(http, 12)
    context = replace(context, settings=settings.model_copy(update={"retention_alert_steps": 1}))
    add_alert(context.database, sender.run, 8, "resolved")
    before = sender.get("measurements").json()
    (planned,) = purge(context, dry_run=True)
    assert steps_with_tokens(settings) == set(range(1, 13))
    (report,) = purge(context)
    assert (report.steps, report.files, report.file_bytes) == (planned.steps, planned.files, planned.file_bytes)
    # The detectors have alerts of their own in so short a run.
    alerts = {each["step"] for each in sender.get("alerts").json()["items"]}
    near = {step + offset for step in alerts for offset in (-1, 0, 1)}
    kept = ({11, 12} | near) & set(range(1, 13))
    assert 8 in alerts
    assert report.steps == 12 - len(kept) > 0
    assert remove_due_files(context.database, context.store) == report.files == report.steps
    assert steps_with_tokens(settings) == kept
    assert sender.get("measurements").json() == before
    assert [each.steps for each in purge(context)] == [0]


def test_purged_tokens_are_gone_and_summaries_stay(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = log(http, 4)
    announce_checkpoint(sender, 1)
    probe = ask_for_probe(sender, 1, ["vllm.prefill", "torch.float32"], exact_pairs=[]).json()
    # A step with an unfinished job keeps its tokens.
    assert [each.steps for each in purge(context)] == [1]
    work_off(http)
    attribution = sender.get("steps/1/attribution").json()
    assert [each.steps for each in purge(context)] == [1]
    remove_due_files(context.database, context.store)
    assert steps_with_tokens(settings) == {3, 4}

    gone = sender.get("steps/1/tokens")
    assert problem_of(gone) == (410, "tokens-purged")
    assert "tokens purged by retention" in gone.json()["detail"]
    assert sender.get("steps/1/corrections").status_code == 200
    assert sender.get("steps/1/buckets").status_code == 200
    assert sender.get("steps/1/attribution").json() == attribution
    steps = {each["step"]: each for each in sender.get("steps").json()["items"]}
    assert (steps[1]["full_rollouts"], steps[1]["rollouts"]) == (0, 6)
    assert steps[1]["coverage"] == "all tokens, in statistics; 0 of 6 rollouts in full"
    assert http.get(f"/runs/{sender.run}/steps/1").status_code == 200

    refused = ask_for_probe(sender, 1, ["vllm.prefill"])
    assert (refused.status_code, "tokens purged by retention" in refused.json()["detail"]) == (422, True)
    assert http.post(f"/v1/probes/{probe['id']}/retry").status_code == 410
    assert ask_for_lease(http).status_code == 204

    key = StepKey(sender.run, 1, 1)
    for left in (check_step(context, key), remeasure_step(context, key)):
        assert left == "tokens purged by retention; its measures stay"
    # The same shard again is a duplicate and brings nothing back.
    assert sender.put_shard(1, make_batch(seed=1)).json()["status"] == "duplicate"
    assert steps_with_tokens(settings) == {3, 4}


def test_stale_attribution_of_a_purged_step_is_settled(http: httpx.Client, context: ServiceContext) -> None:
    sender = log(http, 4)
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1, ["vllm.prefill", "torch.float32"]).raise_for_status()
    work_off(http)
    assert [each.steps for each in purge(context)] == [2]
    before = sender.get("steps/1/attribution").json()
    context.database.write(lambda session: session.execute(update(Attribution).values(stale=True, changed_at_us=0)))
    assert compute_stale_attributions(context) == 1
    assert compute_stale_attributions(context) == 0
    assert sender.get("steps/1/attribution").json() == before


def test_late_shard_of_a_purged_step_is_purged_again(
    sender: Sender, context: ServiceContext, settings: Settings
) -> None:
    sender.put_shard(1, make_batch(seed=1), 0, 2).raise_for_status()
    for step in (2, 3, 4):
        sender.put_shard(step, make_batch(seed=step)).raise_for_status()
    # Step 1 is open: it waits for its second shard.
    assert [each.steps for each in purge(context)] == [1]
    sender.put_shard(1, make_batch(seed=11, prefix="late"), 1, 2).raise_for_status()
    assert [each.steps for each in purge(context)] == [1]
    remove_due_files(context.database, context.store)
    assert steps_with_tokens(settings) == {3, 4}


def test_resumed_run_keeps_steps_of_its_newest_attempt(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = log(http, 10)
    resumed = sender.new_attempt("again", 4)
    for step in (4, 5, 6):
        resumed.put_shard(step, make_batch(seed=100 + step)).raise_for_status()
    list(purge(context))
    remove_due_files(context.database, context.store)
    kept = {(int(name.split("/")[1]), int(name.split("/")[2])) for name in list_files(settings)}
    # Superseded steps beyond the newest one stay until the run has passed them.
    assert kept == {(1, step) for step in range(5, 11)} | {(2, 5), (2, 6)}


def test_without_a_number_of_last_steps_nothing_is_purged(http: httpx.Client, context: ServiceContext) -> None:
    log(http, 4)
    without = replace(context, settings=context.settings.model_copy(update={"retention_last_steps": None}))
    assert list(purge(without)) == []
    assert (purge_all(context), purge_all(context)) == (2, 0)


def test_command_reports_per_run_and_changes_nothing_in_a_dry_run(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sender = log(http, 5)
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)
    monkeypatch.setenv("FORESHOCK_RETENTION_LAST_STEPS", "2")
    monkeypatch.setenv("FORESHOCK_RETENTION_ALERT_STEPS", "0")
    files = list_files(settings)
    retention("a-run", dry_run=True)
    line, total = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{sender.run}\tdefault/a-run\t3 steps (1 to 3)\t3 files\t")
    assert total.startswith("the tokens of 3 steps would be purged")
    assert list_files(settings) == files
    assert sender.get("steps/1/tokens").status_code == 200
    retention(None, dry_run=False)
    assert "the tokens of 3 steps are purged" in capsys.readouterr().out
    assert sender.get("steps/1/tokens").status_code == 410
