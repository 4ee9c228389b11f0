"""Deletion of rollouts by sample id and by prompt group: tokens go, measures stay, nothing brings them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.rollouts import decode_rollouts, decode_scores
from foreshock_service.maintenance.delete_rollouts import carry_out_deletions
from foreshock_service.maintenance.delete_runs import delete_rollouts, delete_whole_run
from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import (
    Deletion,
    MeasurementStatistics,
    ScoreShard,
    Shard,
    ShardStatistics,
)
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.removal import remove_due_files
from foreshock_service.runs.events import StepKey
from tests.service.sending import Sender, make_batch, start_run
from tests.service.stored import list_files
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, take_lease, work_off


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings whose files go at once: the grace is tested with the deletion of runs."""
    return settings.model_copy(update={"removal_grace_seconds": 0.0})


def delete(sender: Sender, context: ServiceContext, **ids: list[str]) -> dict[str, Any]:
    """Delete rollouts by the API and carry it out; return how it ended."""
    made = sender.http.post(f"/v1/runs/{sender.run}/deletions", json=ids)
    assert made.status_code == 202, made.text
    assert not carry_out_deletions(context, round_seconds=60)
    remove_due_files(context.database, context.store)
    done: dict[str, Any] = sender.get("deletions").json()["items"][0]
    assert (done["id"], done["state"]) == (made.json()["id"], "done")
    return done


def stored_samples(settings: Settings) -> set[str]:
    """Return every sample id in any file of the store."""
    found: set[str] = set()
    for name in list_files(settings):
        data = (Path(settings.store_url) / name).read_bytes()
        found.update((decode_scores if "/scores/" in name else decode_rollouts)(data).sample_ids)
    return found


def ids_in_summaries(context: ServiceContext) -> set[str]:
    """Return every sample and group id in the summaries of shards and steps."""
    found: set[str] = set()
    with context.database.read() as session:
        for table in (ShardStatistics, MeasurementStatistics):
            for summaries in session.scalars(select(table.summaries).where(table.summaries.is_not(None))):
                rows = RolloutSummaries.from_bytes(summaries or b"").table
                found.update(rows.column("sample_id").to_pylist(), rows.column("group_id").to_pylist())
    return found


def test_samples_go_from_every_file_and_measures_stay(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = start_run(http)
    for step in (1, 2):
        sender.put_shard(step, make_batch(seed=step)).raise_for_status()
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1, ["vllm.prefill", "torch.float32"]).raise_for_status()
    work_off(http)
    before = {path: sender.get(path).json() for path in ("steps/1/buckets", "steps/1/attribution")}
    curves = sender.get("measurements").json()["columns"]

    done = delete(sender, context, sample_ids=["sample-1-0", "sample-1-3", "not-there"])
    assert (done["steps"], done["rollouts"], done["files"]) == (1, 2, 3)
    everyone = {f"sample-{seed}-{number}" for seed in (1, 2) for number in range(6)}
    assert stored_samples(settings) == everyone - {"sample-1-0", "sample-1-3"}
    assert not {"sample-1-0", "sample-1-3"} & ids_in_summaries(context)
    assert len(list_files(settings)) == 4

    assert sender.get("measurements").json()["columns"] == curves
    assert sender.get("steps/1/attribution").json() == before["steps/1/attribution"]
    buckets = sender.get("steps/1/buckets").json()
    assert buckets.pop("coverage") != before["steps/1/buckets"].pop("coverage")
    assert buckets == before["steps/1/buckets"]
    steps = {each["step"]: each for each in sender.get("steps").json()["items"]}
    assert steps[1]["coverage"] == "all tokens, in statistics; 4 of 6 rollouts in full"
    assert steps[2]["coverage"] == "all tokens"
    assert sender.get("steps/1/tokens", sample_id="sample-1-0").status_code == 404
    left = sender.get("steps/1/tokens", sample_id="sample-1-1").json()
    assert "vllm.prefill" in left["scorers"]
    assert remeasure_step(context, StepKey(sender.run, 1, 1)).left == (
        "2 of its 6 rollouts were deleted; its measures stay"
    )
    with context.database.read() as session:
        stored = session.scalars(select(Deletion)).one()
    assert "sample-1-0" not in str(stored.sample_digests)


def test_groups_go_and_a_second_sending_brings_nothing_back(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = start_run(http)
    first, second = make_batch(seed=1), make_batch(seed=2, prefix="other")
    sender.put_shard(1, first, 0, 2).raise_for_status()
    delete(sender, context, group_ids=["group-0"])
    # The same bytes are a duplicate.
    assert sender.put_shard(1, first, 0, 2).json()["status"] == "duplicate"
    assert "sample-1-0" not in stored_samples(settings)
    # Another shard that arrives later is searched too.
    sender.put_shard(1, second, 1, 2).raise_for_status()
    assert not carry_out_deletions(context, round_seconds=60)
    # The file is lost, and the same bytes restore it.
    with context.database.read() as session:
        name = session.scalars(select(Shard.file).where(Shard.shard == 0)).one()
    context.store.remove(name)
    assert sender.put_shard(1, first, 0, 2).json()["status"] == "duplicate"
    assert not carry_out_deletions(context, round_seconds=60)
    remove_due_files(context.database, context.store)
    kept = {f"{prefix}-{seed}-{number}" for prefix, seed in (("sample", 1), ("other", 2)) for number in range(2, 6)}
    assert stored_samples(settings) == kept
    assert "group-0" not in ids_in_summaries(context)
    assert "group-1" in ids_in_summaries(context)
    assert sender.get("steps/1/corrections").status_code == 200


def test_jobs_of_the_step_are_skipped_and_a_new_probe_takes_the_others(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch(seed=1)).raise_for_status()
    announce_checkpoint(sender, 1)
    probe = ask_for_probe(sender, 1, ["vllm.prefill", "torch.float32"]).json()
    holder = take_lease(http)
    delete(sender, context, sample_ids=["sample-1-5"])
    lost = holder.heartbeat()
    assert (lost.status_code, lost.json()["type"]) == (409, "urn:foreshock:problem:lease-lost")
    ended = http.get(f"/v1/probes/{probe['id']}").json()
    assert (ended["state"], ended["reason"]) == ("skipped", "rollouts of its step were deleted: request a new probe")
    assert http.post(f"/v1/probes/{probe['id']}/retry").status_code == 422
    again = ask_for_probe(sender, 1, ["vllm.prefill", "torch.float32"])
    assert again.status_code == 201
    assert (again.json()["id"] != probe["id"], again.json()["rollouts"]) == (True, 5)
    assert work_off(http) == 2
    assert sender.get("steps/1/attribution").status_code == 200
    assert ask_for_lease(http).status_code == 204


def test_step_without_a_rollout_left_and_sampled_shards(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch(seed=1)).raise_for_status()
    sender.put_statistics(2, make_batch(seed=2)).raise_for_status()
    done = delete(sender, context, group_ids=["group-0", "group-1", "group-2"])
    assert done["steps"] == 2
    assert stored_samples(settings) == set()
    gone = sender.get("steps/1/tokens")
    assert (gone.status_code, gone.json()["type"]) == (410, "urn:foreshock:problem:tokens-purged")
    assert sender.get("steps/2/corrections").status_code == 200
    assert not {"group-0", "sample-1-0"} & ids_in_summaries(context)


def test_requests_without_ids_or_rights_are_refused(http: httpx.Client) -> None:
    sender = start_run(http)
    assert http.post(f"/v1/runs/{sender.run}/deletions", json={}).status_code == 422
    assert http.post("/v1/runs/run_unknown/deletions", json={"sample_ids": ["a"]}).status_code == 404


def test_commands_count_first_and_then_delete(
    http: httpx.Client,
    context: ServiceContext,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)
    monkeypatch.setenv("FORESHOCK_TOKEN_PASS", "numpy")
    monkeypatch.setenv("FORESHOCK_DECODE_PROCESSES", "1")
    sender = start_run(http)
    for step in (1, 2):
        sender.put_shard(step, make_batch(seed=step)).raise_for_status()
    files = list_files(settings)
    delete_rollouts("a-run", (), ["group-1"], dry_run=True)
    assert capsys.readouterr().out == "4 rollouts of 2 steps in 2 files would be deleted; nothing was changed\n"
    assert list_files(settings) == files
    delete_rollouts("a-run", (), ["group-1"], dry_run=False)
    assert capsys.readouterr().out.startswith("4 rollouts of 2 steps in 2 files deleted; ")
    delete_whole_run("a-run", dry_run=True)
    assert "2 steps, 2 token files" in capsys.readouterr().out
    assert sender.get("steps").status_code == 200
    delete_whole_run("a-run", dry_run=False)
    assert sender.get("steps").status_code == 410
    entries = http.get("/v1/audit", params={"run": sender.run}).json()["items"]
    assert {"run.delete", "rollouts.delete"} <= {each["action"] for each in entries}
    assert all(each["actor"].startswith("console:") for each in entries if "delete" in each["action"])


def test_score_rows_count_what_is_left(http: httpx.Client, context: ServiceContext) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch(seed=1)).raise_for_status()
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1, ["vllm.prefill"]).raise_for_status()
    work_off(http)
    delete(sender, context, sample_ids=["sample-1-2"])
    with context.database.read() as session:
        assert session.scalars(select(ScoreShard.rollouts)).all() == [5]
