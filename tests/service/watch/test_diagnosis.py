"""The diagnosis of runs: stored by the transaction that changes it, and read as it is stored."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import delete, update

from foreshock.api.records import to_json
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Run, Step, StoredDiagnosis
from foreshock_service.runs.runs import mark_stale_runs
from foreshock_service.watch import diagnosis
from foreshock_service.watch.advance import mark_waiting_runs
from tests.service.sending import Sender, log_probs_of, make_batch, start_run
from tests.service.working import announce_checkpoint, ask_for_probe, work_off


def diagnosis_of(sender: Sender) -> Any:
    return sender.get("diagnosis").raise_for_status().json()


def stored(context: ServiceContext, run: str) -> StoredDiagnosis | None:
    with context.database.read() as session:
        return session.get(StoredDiagnosis, run)


def test_a_new_run_is_unknown_and_reading_stores_nothing(sender: Sender, context: ServiceContext) -> None:
    read = diagnosis_of(sender)
    assert (read["verdict"], read["headline"], read["revision"]) == ("unknown", "Unknown: no step is complete yet.", 0)
    assert stored(context, sender.run) is None


def test_a_closing_step_stores_the_diagnosis_with_a_revision(sender: Sender, context: ServiceContext) -> None:
    sender.put_shard(1, make_batch(12, seed=1)).raise_for_status()
    first = diagnosis_of(sender)
    assert first["headline"].startswith("Unknown: 1 step with both log-probs (5 needed)")
    assert (first["revision"], first["observed_step"]) == (1, 1)
    sender.put_shard(1, make_batch(12, seed=1)).raise_for_status()
    assert diagnosis_of(sender) == first
    sender.put_shard(2, make_batch(12, seed=2)).raise_for_status()
    assert diagnosis_of(sender)["revision"] == 2
    found = stored(context, sender.run)
    assert found is not None
    assert (found.verdict, found.headline) == ("unknown", diagnosis_of(sender)["headline"])


def test_missing_shards_of_the_first_step_are_named_at_once_and_only_once(sender: Sender) -> None:
    for shard in (0, 1):
        sender.put_shard(0, make_batch(12, seed=shard), shard=shard, shards=4).raise_for_status()
    read = diagnosis_of(sender)
    assert read["headline"].startswith("Unknown: step 0 is waiting for ranks 2 and 3 of 4 since ")
    assert len(read["missing"]) == 1
    sender.put_shard(0, make_batch(12, seed=2), shard=2, shards=4).raise_for_status()
    assert "for rank 3 of 4 since" in diagnosis_of(sender)["headline"]
    sender.put_shard(0, make_batch(12, seed=3), shard=3, shards=4).raise_for_status()
    assert "waiting" not in str(diagnosis_of(sender))


def test_missing_shards_of_a_later_step_are_named_after_a_while(sender: Sender, context: ServiceContext) -> None:
    sender.put_shard(0, make_batch(12, seed=1)).raise_for_status()
    sender.put_shard(1, make_batch(12, seed=2), shard=0, shards=2).raise_for_status()
    assert mark_waiting_runs(context) == 0
    a_while_ago = Step.last_shard_at_us - int(diagnosis.WAIT_SECONDS * 1e6) - 1
    context.database.write(lambda session: session.execute(update(Step).values(last_shard_at_us=a_while_ago)))
    assert mark_waiting_runs(context) == 1
    assert "step 1 is waiting for rank 1 of 2 since" in str(diagnosis_of(sender)["missing"])
    assert mark_waiting_runs(context) == 0
    sender.put_shard(1, make_batch(12, seed=3), shard=1, shards=2).raise_for_status()
    assert "waiting" not in str(diagnosis_of(sender))


def test_a_stale_run_an_answered_alert_and_a_resume_change_it(
    sender: Sender, http: httpx.Client, context: ServiceContext
) -> None:
    for step in range(3):
        sender.put_shard(step, make_batch(12, seed=step)).raise_for_status()
    context.database.write(lambda session: session.execute(update(Run).values(seen_at_us=1)))
    assert mark_stale_runs(context, 0) == 1
    read = diagnosis_of(sender)
    assert "no client of the run gave a sign of life" in read["headline"]
    (alert,) = [each for each in sender.get("alerts", state="open").json()["items"] if each["rule"] == "stale_run"]
    http.post(f"/v1/runs/{sender.run}/alerts/{alert['id']}/resolve").raise_for_status()
    assert "sign of life" not in diagnosis_of(sender)["headline"]
    sender.new_attempt("again", resume_step=0)
    assert diagnosis_of(sender)["headline"] == "Unknown: no step is complete yet."


def test_missing_row_or_one_of_another_judge_is_computed(
    sender: Sender, context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.put_shard(1, make_batch(12, seed=1)).raise_for_status()
    want = diagnosis_of(sender)
    context.database.write(lambda session: session.execute(delete(StoredDiagnosis)))
    assert diagnosis_of(sender)["headline"] == want["headline"]
    assert mark_waiting_runs(context) == 1
    assert diagnosis_of(sender)["headline"] == want["headline"]
    context.database.write(
        lambda session: session.execute(update(StoredDiagnosis).values(judged_by="older", headline="old"))
    )
    assert mark_waiting_runs(context) == 1
    assert mark_waiting_runs(context) == 0
    found = stored(context, sender.run)
    assert found is not None
    assert found.headline == want["headline"]


def test_a_run_that_has_ended_keeps_its_diagnosis_after_an_upgrade(http: httpx.Client, context: ServiceContext) -> None:
    run = start_run(http)
    run.put_shard(1, make_batch(12, seed=1)).raise_for_status()
    http.patch(f"/v1/runs/{run.run}", json={"state": "finished"}).raise_for_status()
    older = update(StoredDiagnosis).values(judged_by="older", headline="old")
    context.database.write(lambda session: session.execute(older))
    assert mark_waiting_runs(context) == 0
    found = stored(context, run.run)
    assert found is not None
    assert found.headline == "old"


def test_judge_that_raises_stops_no_upload(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(history: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(diagnosis, "diagnose", fail)
    sender.put_shard(1, make_batch(12, seed=1)).raise_for_status()
    assert diagnosis_of(sender)["headline"] == "Unknown: this run could not be diagnosed."


def content(read: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in read.items() if name not in ("revision", "computed_at_us")}


def shifted(step: int, shard: int = 0) -> RolloutBatch:
    """Return rollouts whose log π belongs to the next token: a critical mismatch with a cause."""
    batch = make_batch(24, seed=7 * step + shard, prefix=f"{step}-{shard}")
    return replace(batch, trainer_log_probs=np.roll(log_probs_of(batch)[0], -1))


@pytest.mark.parametrize("rows", [24, 6])
def test_the_headline_says_if_only_a_part_of_the_rollouts_is_concerned(sender: Sender, rows: int) -> None:
    batch = make_batch(24, seed=5)
    behaviour, target = log_probs_of(batch)
    target = np.where(np.arange(batch.num_tokens) < batch.response_offsets[rows], behaviour, target)
    for step in range(3):
        sender.put_shard(step, replace(batch, trainer_log_probs=target)).raise_for_status()
    (title,) = [each["title"] for each in diagnosis_of(sender)["causes"] if each["name"] == "identical_log_probs"]
    assert title.endswith("in a part of the rollouts") == (rows < 24)


@pytest.mark.parametrize("k3", [3e-4, 0.4])
def test_a_run_of_scalars_whose_k3_contradicts_its_differences(sender: Sender, k3: float) -> None:
    names = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")
    for step in range(1, 12):
        sender.put_scalars(step, {"reward": 0.5, "k3": k3, **dict(zip(names, (0.004, 0.3), strict=True))})
    read = diagnosis_of(sender)
    said = f"k3 of {k3:.1e}".replace("e-04", "e-4") if k3 < 0.1 else "k3 of 0.40"
    assert said in read["missing"][0]["sentence"]
    assert ("contradicts" in read["missing"][0]["sentence"]) == (k3 == 0.4)
    assert read["headline"].startswith(
        "Warning since step 1: the logged k3, 0.40 at step 1, contradicts the logged mean and largest |d|"
        if k3 == 0.4
        else "Unknown: no step has both log-probs"
    )


def test_an_evaluation_that_falls_while_the_reward_rises_is_named(sender: Sender, context: ServiceContext) -> None:
    for step in range(1, 33):
        sender.put_shard(step, make_batch(24, seed=step)).raise_for_status()
        scored = {"val/test_score/code": (0.3 + 0.002 * step if step < 20 else 0.1) + 0.004 * (step % 4)}
        sender.put_scalars(step, {"lr": 1e-6, "val/response_length/mean": 9.0, **(scored if step % 2 == 0 else {})})
    again = sender.new_attempt("again", resume_step=32)
    again.put_scalars(32, {"lr": 1e-6}).raise_for_status()
    (found,) = [each for each in diagnosis_of(sender)["causes"] if each["name"] == "evaluation_fall"]
    with context.database.read() as session:
        assert list(diagnosis.history_of(session, sender.run).evaluations) == ["val/test_score/code"]
    assert found["title"] == "val/test_score/code fell from 0.33 to 0.11 since step 20"


def test_a_fault_of_some_steps_is_told_with_their_number(sender: Sender) -> None:
    for step in range(1, 21):
        reward = np.ones(24, np.float32) if step % 3 == 2 else np.tile([0, 1], 12).astype(np.float32)
        sender.put_shard(step, make_batch(24, seed=step, reward=reward)).raise_for_status()
    (found,) = [each for each in diagnosis_of(sender)["causes"] if each["name"] == "no_reward_spread"]
    assert found["title"] == "no group has a spread of rewards in 7 of 19 steps"
    assert "(in 7 of 19 steps since 2)" in found["sentence"]


LOGGED = [(step, shard) for step in range(12) if step not in (4, 5) for shard in range(2)]
RESUMED_AT = 8


@pytest.mark.parametrize("seed", range(3))
def test_gaps_late_shards_and_a_resume_are_the_same_in_any_order(
    http: httpx.Client, context: ServiceContext, seed: int
) -> None:
    """The first attempt's steps from 8 on are superseded, also those that come after the second began."""
    found = []
    for key, order in (("in order", None), (f"order {seed}", random.Random(seed))):
        first = start_run(http, key=key)
        second = first.new_attempt("again", resume_step=RESUMED_AT) if order else None
        items = [(1, *each) for each in LOGGED] + [(2, *each) for each in LOGGED if each[0] >= RESUMED_AT]
        for attempt, step, shard in order.sample(items, len(items)) if order else items:
            if attempt == 2 and second is None:
                second = first.new_attempt("again", resume_step=RESUMED_AT)
            sender = first if attempt == 1 else second
            assert sender is not None
            body = shifted(step, shard) if attempt == 2 or step < RESUMED_AT else make_batch(24, seed=step)
            sender.put_shard(step, body, shard=shard, shards=2).raise_for_status()
            if shard:
                sender.put_scalars(step, {"grad_norm": 1.0 + step}).raise_for_status()
        mark_waiting_runs(context)
        found.append(content(diagnosis_of(first)))
    assert found[0]["verdict"] == "critical"
    assert found[0]["observed_step"] == 11
    assert "the data show: the two log-probs are shifted by one token" in found[0]["headline"]
    assert found[1] == found[0]


def test_first_steps_are_read_beside_the_newest(
    http: httpx.Client, context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "WINDOW_STEPS", 4)
    monkeypatch.setattr(diagnosis, "FIRST_STEPS", 3)
    run = start_run(http)
    for step in range(1, 6):
        run.put_shard(step, make_batch(24, seed=step)).raise_for_status()
    again = run.new_attempt("again", resume_step=3)
    for step in range(3, 11):
        again.put_shard(step, make_batch(24, seed=10 + step)).raise_for_status()
    with context.database.read() as session:
        history = diagnosis.history_of(session, run.run)
    assert history.k3.steps == [7, 8, 9, 10]
    assert history.first_k3.steps == [1, 2, 3]
    assert len(history.first_lags) == 3


CHANGES: dict[str, Callable[[Sender], httpx.Response | None]] = {
    "late shard": lambda run: run.put_shard(2, shifted(2), shard=1, shards=2),
    "statistics": lambda run: run.put_statistics(9, make_batch(24, seed=9)),
    "scalars": lambda run: run.put_scalars(5, {"grad_norm": 1e300}),
    "kind of model": lambda run: run.http.patch(f"/v1/runs/{run.run}", json={"model_kind": "moe"}),
    "names of scalars": lambda run: run.http.patch(f"/v1/runs/{run.run}", json={"scalar_names": {"reward": "score"}}),
    "state": lambda run: run.http.patch(f"/v1/runs/{run.run}", json={"state": "finished"}),
    "announced change": lambda run: run.http.put(f"/v1/runs/{run.run}/changes/4/length_cap", json={}),
    "resume": lambda run: run.new_attempt("again", resume_step=4).put_shard(4, make_batch(24, seed=4)),
    "probe": lambda run: announce_and_score(run),
}


def announce_and_score(run: Sender) -> None:
    announce_checkpoint(run, 5).raise_for_status()
    ask_for_probe(run, 5).raise_for_status()
    assert work_off(run.http)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_leaves_no_old_sentence(sender: Sender, context: ServiceContext, change: str) -> None:
    for step in range(8):
        shards = 2 if step == 2 else 1
        sender.put_shard(step, shifted(step), shards=shards).raise_for_status()
        sender.put_scalars(step, {"grad_norm": 1.0, "score": 0.5}).raise_for_status()
    answer = CHANGES[change](sender)
    assert answer is None or answer.is_success, answer.text
    with context.database.read() as session:
        fresh = to_json(diagnosis.judge(diagnosis.history_of(session, sender.run)))
    assert content(diagnosis_of(sender)) == content(fresh)
