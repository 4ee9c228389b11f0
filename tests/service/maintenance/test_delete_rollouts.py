"""Deletion of rollouts by sample id and by prompt group: tokens go, measures stay, nothing brings them back."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.rollouts import decode_rollouts, decode_scores
from foreshock_service.maintenance.delete_rollouts import carry_out_deletions
from foreshock_service.maintenance.delete_runs import delete_rollouts, delete_whole_run
from foreshock_service.maintenance.fsck import Request, check_store
from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import (
    Deletion,
    MeasurementStatistics,
    ProbeResult,
    ScoreShard,
    Shard,
    ShardStatistics,
)
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.removal import remove_due_files
from foreshock_service.platform.store.tokens import LocalFile, shard_file_name
from foreshock_service.runs import shards
from foreshock_service.runs.deletions import DeletionCreate, store_deletion
from foreshock_service.runs.events import StepKey
from tests.service.replay.results import test_doctor
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


def spoil_column(settings: Settings, name: str, column: str) -> None:
    """Overwrite the middle of a column's first page in a stored file."""
    path = Path(settings.store_url) / name
    footer = pq.read_metadata(path)
    place = footer.schema.to_arrow_schema().names.index(column)
    chunk = footer.row_group(0).column(place)
    data = bytearray(path.read_bytes())
    middle = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size // 2
    data[middle : middle + 8] = bytes(byte ^ 0x55 for byte in data[middle : middle + 8])
    path.write_bytes(data)


def test_files_that_are_gone_or_damaged_are_skipped_and_stop_nothing_else(
    http: httpx.Client, context: ServiceContext, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start_run(http), start_run(http, key="other")
    for step in (1, 2, 3, 4):
        first.put_shard(step, make_batch(seed=step, prefix="a")).raise_for_status()
    announce_checkpoint(first, 3)
    ask_for_probe(first, 3, ["vllm.prefill"]).raise_for_status()
    work_off(http)
    second.put_shard(1, make_batch(seed=9, prefix="b")).raise_for_status()
    with context.database.read() as session:
        rows = session.execute(select(Shard.step, Shard.file).where(Shard.run_id == first.run))
        files = {row.step: row.file for row in rows}
        scores = session.scalars(select(ScoreShard.file)).one()
    spoil_column(settings, files[1], "response_token_ids")
    spoil_column(settings, files[2], "sample_id")
    context.store.remove(scores)
    first.http.post(f"/v1/runs/{first.run}/deletions", json={"group_ids": ["group-0"]}).raise_for_status()
    done = delete(second, context, group_ids=["group-0"])
    assert (done["rollouts"], done["files"]) == (2, 1)
    skipped = first.get("deletions").json()["items"][0]
    # Those of steps 3 and 4.
    assert (skipped["state"], skipped["rollouts"], skipped["files"]) == ("done", 4, 2)
    for name in (files[1], files[2], scores):
        assert f"{name} is gone or damaged" in caplog.text
    assert "group-0" not in ids_in_summaries(context)
    # The same bytes restore the files, and the deletion finds them.
    for step in (1, 2):
        assert first.put_shard(step, make_batch(seed=step, prefix="a")).json()["status"] == "duplicate"
    assert not carry_out_deletions(context, round_seconds=60)
    remove_due_files(context.database, context.store)
    everyone = {f"a-{step}-{number}" for step in (1, 2, 3, 4) for number in range(2, 6)}
    assert stored_samples(settings) == everyone | {f"b-9-{number}" for number in range(2, 6)}


def test_a_deletion_that_fails_is_tried_again_and_stops_no_other(
    http: httpx.Client, context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start_run(http), start_run(http, key="other")
    for sender in (first, second):
        sender.put_shard(1, make_batch(seed=1)).raise_for_status()
        body = {"sample_ids": ["sample-1-0"]}
        http.post(f"/v1/runs/{sender.run}/deletions", json=body).raise_for_status()
    open_file = LocalFile.open

    def refuse(file: LocalFile) -> Any:
        if first.run in file.name:
            raise PermissionError(errno.EACCES, "refused")
        return open_file(file)

    def run_here(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFile, "open", refuse)
        patched.setattr(context.decoders, "run", run_here)
        with pytest.raises(PermissionError):
            carry_out_deletions(context, round_seconds=60)
    states = [sender.get("deletions").json()["items"][0]["state"] for sender in (first, second)]
    assert states == ["running", "done"]
    assert not carry_out_deletions(context, round_seconds=60)
    assert first.get("deletions").json()["items"][0]["state"] == "done"


def test_reports_on_the_step_name_no_deleted_rollout(http: httpx.Client, context: ServiceContext) -> None:
    sender = start_run(http)
    sender.put_shard(test_doctor.STEP, make_batch(test_doctor.ROLLOUTS)).raise_for_status()
    for step in (1, test_doctor.STEP):
        announce_checkpoint(sender, step)
    test_doctor.ask(sender).raise_for_status()
    holder = take_lease(http, scorers=test_doctor.ABLE)
    report, names = test_doctor.found(holder), holder.rollouts().sample_ids[:2]
    report["findings"][0]["sample_ids"] = list(names)
    test_doctor.put_report(holder, report).raise_for_status()
    holder.complete().raise_for_status()
    delete(sender, context, sample_ids=[names[0]])
    shown = sender.get(f"steps/{test_doctor.STEP}/doctor").raise_for_status().json()
    assert shown["report"]["findings"][0]["sample_ids"] == [names[1]]
    with context.database.read() as session:
        assert f'"{names[0]}"' not in str(session.scalars(select(ProbeResult.document)).one()).replace("'", '"')


def test_a_fold_that_was_read_before_a_deletion_is_searched(
    http: httpx.Client, context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch(seed=1), 0, 2).raise_for_status()
    fold, deleted = shards._fold, list[bool]()

    def delete_meanwhile(session: Session, key: StepKey) -> Any:
        found = fold(session, key)
        if not deleted:
            deleted.append(True)
            body = DeletionCreate(sample_ids=["sample-1-3"])
            context.database.write(lambda session: store_deletion(session, UNRESTRICTED, sender.run, body))
            assert not carry_out_deletions(context, round_seconds=60)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(shards, "_fold", delete_meanwhile)
        sender.put_shard(1, make_batch(seed=2), 1, 2).raise_for_status()
    assert deleted
    assert not carry_out_deletions(context, round_seconds=60)
    assert "sample-1-3" not in ids_in_summaries(context)


def test_repair_brings_no_deleted_rollout_back(http: httpx.Client, context: ServiceContext, settings: Settings) -> None:
    sender, body = start_run(http), make_batch(seed=1)
    for step in (1, 2):
        sender.put_shard(step, body).raise_for_status()
    store = context.store

    def lose(step: int) -> tuple[str, bytes]:
        with context.database.read() as session:
            name = session.scalars(select(Shard.file).where(Shard.step == step)).one()
        data = store.file(name).read_bytes()
        store.remove(name)
        return name, data

    _, first = lose(2)
    delete(sender, context, sample_ids=["sample-1-3"])
    lose(1)
    with context.database.read() as session:
        digests = {row.step: row.digest for row in session.execute(select(Shard.step, Shard.digest))}
    for step, digest in digests.items():
        # An upload of the same bytes that did not come to its commit.
        temporary = store.temporary_file()
        temporary.write_bytes(first)
        store.publish(temporary, shard_file_name(sender.run, 1, step, 0, digest))
    at_once = replace(context, settings=settings.model_copy(update={"orphan_grace_seconds": -1.0}))
    report = check_store(at_once, Request(repair=True), lambda _: None)
    found = {(each.problem, each.repaired is not None) for each in report.findings}
    assert found == {("missing", False), ("missing", True), ("orphan", True)}
    assert not carry_out_deletions(context, round_seconds=60)
    remove_due_files(context.database, context.store)
    assert stored_samples(settings) == {f"sample-1-{number}" for number in (0, 1, 2, 4, 5)}
