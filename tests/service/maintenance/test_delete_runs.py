"""Deletion of runs: a tombstone at once, rows in short transactions, files after the grace."""

import httpx
import pytest
from sqlalchemy import select

from foreshock.clock import now_us
from foreshock_service.maintenance import delete_runs as deletion
from foreshock_service.maintenance.delete_runs import delete_rows_of_deleted_runs, delete_whole_run
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import FileRemoval, Run
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.removal import remove_due_files
from tests.service.sending import Sender, make_batch, problem_of, start_run
from tests.service.stored import count_rows, list_files
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, take_lease, work_off


def fill(http: httpx.Client, key: str, steps: int = 3) -> Sender:
    """Log a run that has rows in most tables: shards, scalars, scores, an attribution, alerts, advice."""
    sender = start_run(http, key)
    for step in range(1, steps + 1):
        sender.put_shard(step, make_batch(seed=step)).raise_for_status()
        sender.put_scalars(step, {"reward": 0.5, "entropy": 1.0}).raise_for_status()
    announce_checkpoint(sender, 1)
    assert ask_for_probe(sender, 1, ["vllm.prefill", "torch.float32"]).status_code == 201
    work_off(http)
    return sender


def test_deleted_run_leaves_only_its_tombstone_and_other_runs_stay(
    http: httpx.Client, context: ServiceContext, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = fill(http, "kept")
    before, files = count_rows(settings), list_files(settings)
    sender = fill(http, "deleted")
    of_run = [name for name in list_files(settings) if name not in files]
    assert len(of_run) == 5
    assert http.delete(f"/v1/runs/{sender.run}").status_code == 204

    # Rows go a few at a time, so that the transactions stay short.
    monkeypatch.setattr(deletion, "_ROWS_AT_ONCE", 2)
    assert not delete_rows_of_deleted_runs(context, round_seconds=60)
    after = count_rows(settings)
    assert after.pop("file_removals") == len(of_run)
    # The tombstone and, for the requests to come, the known worker.
    assert after == {**before, "runs": before["runs"] + 1}
    with context.database.read() as session:
        tombstone = session.get(Run, sender.run)
    assert tombstone is not None
    assert (tombstone.key, tombstone.name) == ("deleted", None)
    assert tombstone.rows_removed_at_us is not None

    # Within the grace of two days the files stay.
    assert remove_due_files(context.database, context.store) == 0
    assert set(of_run) <= set(list_files(settings))
    with context.database.read() as session:
        due = session.scalars(select(FileRemoval.due_at_us)).all()
    assert all(abs(each - now_us() - 172_800_000_000) < 600_000_000 for each in due)
    monkeypatch.setattr("foreshock_service.platform.store.removal.now_us", lambda: max(due))
    assert remove_due_files(context.database, context.store) == len(of_run)
    assert list_files(settings) == files
    assert kept.get("measurements").status_code == 200
    assert kept.get("steps/1/tokens").status_code == 200


def test_calls_for_a_deleted_run_and_its_key_are_gone(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = fill(http, "gone", steps=1)
    assert http.delete(f"/v1/runs/{sender.run}").status_code == 204
    for stage in ("tombstone", "rows removed"):
        late = sender.put_shard(2, make_batch(seed=9))
        assert problem_of(late) == (410, "run-deleted"), stage
        assert sender.put_scalars(2, {"reward": 1.0}).status_code == 410
        assert sender.get("measurements").status_code == 410
        assert http.delete(f"/v1/runs/{sender.run}").status_code == 410
        again = http.post("/v1/runs", json={"key": "gone"})
        assert problem_of(again) == (410, "run-deleted")
        delete_rows_of_deleted_runs(context, round_seconds=60)
    assert count_rows(settings)["runs"] == 1


def test_jobs_of_a_deleted_run_end_and_their_worker_is_told(http: httpx.Client, context: ServiceContext) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch()).raise_for_status()
    announce_checkpoint(sender, 1)
    probe = ask_for_probe(sender, 1, ["vllm.prefill", "torch.float32"]).json()
    holder = take_lease(http)
    assert http.delete(f"/v1/runs/{sender.run}").status_code == 204
    assert holder.heartbeat().status_code == 410
    assert holder.get_rollouts().status_code == 410
    assert http.get(f"/v1/probes/{probe['id']}").status_code == 410
    assert ask_for_lease(http).status_code == 204
    delete_rows_of_deleted_runs(context, round_seconds=60)
    # As for any unknown lease: the worker drops the work.
    assert holder.heartbeat().status_code == 404
    assert holder.complete().status_code == 404


def test_rounds_go_on_between_uploads(
    http: httpx.Client, context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = fill(http, "large", steps=20)
    other = start_run(http, "other")
    http.delete(f"/v1/runs/{sender.run}").raise_for_status()
    monkeypatch.setattr(deletion, "_ROWS_AT_ONCE", 10)
    rounds = 0
    while delete_rows_of_deleted_runs(context, round_seconds=0.01):
        rounds += 1
        assert other.put_shard(rounds, make_batch(seed=rounds)).status_code == 201
    assert rounds > 3
    assert len(other.get("steps").json()["items"]) == rounds


def test_command_deletes_a_run_and_prints_its_line_of_the_audit(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)
    sender = fill(http, "by-command")
    delete_whole_run("by-command", dry_run=True)
    dry = capsys.readouterr()
    assert "3 steps, 3 token files" in dry.out
    assert "nothing was changed" in dry.out
    assert dry.err == ""
    assert sender.get("steps").status_code == 200
    delete_whole_run("by-command", dry_run=False)
    shown = capsys.readouterr()
    assert f"run {sender.run} (default/by-command): 3 steps, 3 token files" in shown.out
    (line,) = shown.err.splitlines()
    assert f"action=run.delete object={sender.run} project=default" in line
    assert sender.get("steps").status_code == 410
