"""Lint of stored shards, of steps and of the run; over HTTP and on the pages."""

import logging
import re
from dataclasses import replace

import httpx
import numpy as np
import pytest

from foreshock.diagnosis.quantities import ENTROPY_KEY, NAMES
from foreshock.lint import collect_evidence, run_checks
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ShardLint, StepLint
from foreshock_service.runs.judging import LintPart, judge_step
from tests.foreshock.lint.healthy import Policy, healthy_batch
from tests.foreshock.lint.test_after_id import after, batch_with_pad, in_another_context
from tests.foreshock.lint.test_per_entropy import nearly_certain_batch
from tests.service.sending import Sender, copied, make_batch, start_run


def nearly_certain_without_entropy() -> RolloutBatch:
    """Return a batch whose k3 is in its healthy range and large for an entropy of 0.01 nats, which is not in it."""
    return replace(nearly_certain_batch(0.04), entropy=None)


def names(lint: dict[str, object]) -> list[str]:
    warnings = lint["warnings"]
    assert isinstance(warnings, list)
    return [warning["name"] for warning in warnings]


def send(sender: Sender, step: int, *shards: RolloutBatch) -> None:
    for number, shard in enumerate(shards):
        sender.put_shard(step, shard, number, len(shards)).raise_for_status()


def test_clean_step_has_no_warning_and_lists_unmade_checks(sender: Sender, http: httpx.Client) -> None:
    send(sender, 1, healthy_batch(1, groups=3))
    lint = sender.get("steps/1/lint").raise_for_status().json()
    assert (lint["step"], lint["attempt"], lint["shards"], lint["rollouts"]) == (1, 1, 1, 48)
    assert lint["warnings"] == []
    states = {check["name"]: (check["state"], check["why"]) for check in lint["checks"]}
    assert states["identical_log_probs"] == ("clean", "")
    assert states["mean_ratio"] == ("not checked", "the error of mean ρ needs 4 prompt groups, and there are 3")
    page = http.get(f"/runs/{sender.run}/steps/1").raise_for_status().text
    assert "Before you read the numbers" not in page
    assert re.search(r"Semantics: \d+ of \d+ checks could not be made", page)
    assert "mean ratio: the error of mean ρ needs 4 prompt groups" in page


def test_warning_is_merged_over_shards_when_step_closes(sender: Sender) -> None:
    one, two = copied(healthy_batch(1)), copied(healthy_batch(2))
    sender.put_shard(4, one, 0, 2).raise_for_status()
    assert sender.get("steps/4/lint").json()["shards"] == 1
    assert sender.get("lint").json()["checked_steps"] == 0
    sender.put_shard(4, two, 1, 2).raise_for_status()
    lint = sender.get("steps/4/lint").raise_for_status().json()
    (warning,) = lint["warnings"]
    merged = run_checks(collect_evidence(one).merge(collect_evidence(two))).warnings[0]
    assert (warning["name"], warning["severity"]) == ("identical_log_probs", "critical")
    assert warning["seen"] == merged.seen
    assert warning["evidence"] == dict(merged.evidence)
    assert lint["tokens"] == one.num_tokens + two.num_tokens


def test_run_lint_names_first_and_newest_step_of_each_warning(sender: Sender, http: httpx.Client) -> None:
    for step in range(1, 6):
        batch = healthy_batch(step)
        send(sender, step, copied(batch) if step in (2, 4) else batch)
    lint = sender.get("lint").raise_for_status().json()
    assert (lint["checked_steps"], lint["clean_steps"]) == (5, 3)
    (warning,) = lint["warnings"]
    assert warning["title"] == "the two log-probs are the same numbers"
    found = [warning[key] for key in ("name", "severity", "steps", "first_step", "newest_step")]
    assert found == ["identical_log_probs", "critical", 2, 2, 4]
    page = http.get(f"/pages/runs/{sender.run}/semantics").raise_for_status().text
    assert "Before you read the numbers" in page
    assert "at 2 of 5 steps, since step 2" in page
    assert 'href="/runs/default/a-run/steps/4"' in page


def test_superseded_step_is_excluded_from_run_lint(sender: Sender) -> None:
    send(sender, 1, healthy_batch(1))
    send(sender, 2, copied(healthy_batch(2)))
    resumed = sender.new_attempt("again", 2)
    assert sender.get("lint").json()["checked_steps"] == 1
    send(resumed, 2, healthy_batch(2))
    assert names(sender.get("lint").json()) == []
    assert names(sender.get("lint", attempt=1).json()) == ["identical_log_probs"]
    assert sender.get("steps/2/lint").json()["attempt"] == 2
    assert names(sender.get("steps/2/lint", attempt=1).json()) == ["identical_log_probs"]


def test_whole_run_test_warns_when_no_step_does(sender: Sender, http: httpx.Client) -> None:
    for step in range(1, 16):
        batch = healthy_batch(step, Policy(sharpness=1.5), groups=4, per_group=8, longest=8)
        assert batch.entropy is not None
        # Entropy of a broader distribution than the sampling one, nearly a third larger.
        send(sender, step, replace(batch, entropy=batch.entropy * np.float32(1.3), attributes=BatchAttributes()))
    lint = sender.get("lint").raise_for_status().json()
    assert lint["warnings"] == []
    assert lint["whole_run"]["name"] == "raw_log_probs"
    assert lint["whole_run"]["evidence"]["steps"] == 15
    assert "over 15 steps" in lint["whole_run"]["seen"]
    assert "over 15 steps" in http.get(f"/pages/runs/{sender.run}/semantics").text
    # The prompts of these batches are the same in each step.
    (cause, repeated) = sender.get("diagnosis").json()["causes"]
    assert repeated["title"] == "the same prompts are in each of the newest 15 steps"
    assert (cause["name"], cause["certainty"]) == ("raw_log_probs", "shown")
    declared = BatchAttributes(temperature=1.0, top_p=1.0, top_k=-1)
    send(sender, 16, replace(batch, attributes=declared))
    assert sender.get("lint").json()["whole_run"] is None
    assert [each["name"] for each in sender.get("diagnosis").json()["causes"]] == ["repeated_prompts"]


def test_unchecked_step_has_no_lint(sender: Sender, http: httpx.Client, database: Database) -> None:
    send(sender, 1, healthy_batch(1))
    database.write(lambda session: session.query(StepLint).delete())
    database.write(lambda session: session.query(ShardLint).delete())
    answer = sender.get("steps/1/lint")
    assert answer.status_code == 404
    assert "was not checked" in answer.json()["detail"]
    assert sender.get("lint").json()["checked_steps"] == 0
    for path in (f"/pages/runs/{sender.run}/semantics", f"/runs/{sender.run}/steps/1"):
        assert "Semantics: not checked." in http.get(path).raise_for_status().text


def test_stored_verdict_is_served_whole_when_its_evidence_cannot_be_read(sender: Sender, database: Database) -> None:
    send(sender, 1, healthy_batch(1))
    judged = sender.get("steps/1/lint").raise_for_status().json()
    database.write(lambda session: session.query(ShardLint).update({"evidence": b"of another release"}))
    assert sender.get("steps/1/lint").raise_for_status().json() == judged


def test_step_with_overflowing_log_probs_closes(sender: Sender) -> None:
    batch = healthy_batch(1)
    assert batch.rollout_log_probs is not None
    wild = batch.rollout_log_probs.copy()
    wild[:3] = np.float32(-3e38)
    wild[3] = np.inf
    sender.put_shard(1, replace(batch, rollout_log_probs=wild)).raise_for_status()
    assert "non_finite_log_probs" in names(sender.get("steps/1/lint").raise_for_status().json())
    assert sender.get("lint").raise_for_status().json()["checked_steps"] == 1


def test_scalar_entropy_judges_k3_whenever_it_arrives(sender: Sender, http: httpx.Client) -> None:
    http.patch(f"/v1/runs/{sender.run}", json={"model_kind": "dense"}).raise_for_status()
    send(sender, 1, nearly_certain_without_entropy())
    assert "k3_per_entropy" not in names(sender.get("steps/1/lint").raise_for_status().json())
    assert sender.get("lint").raise_for_status().json()["window"] == []
    sender.put_scalars(1, {"actor/entropy": 0.01}).raise_for_status()
    assert "k3_per_entropy" in names(sender.get("steps/1/lint").raise_for_status().json())
    over_run = sender.get("lint").raise_for_status().json()
    assert [warning["name"] for warning in over_run["window"]] == ["k3_per_entropy"]


def test_entropy_is_read_under_the_names_of_the_detectors_and_of_the_run(http: httpx.Client) -> None:
    names_of_entropy = (*NAMES[ENTROPY_KEY], "train/entropy", "train/policy/entropy")
    logged: list[tuple[dict[str, float | None], dict[str, str] | None]] = [({n: 0.01}, None) for n in names_of_entropy]
    logged += [
        ({"my/entropy": 0.01, "entropy": 5.0}, {"entropy": "my/entropy"}),
        # The term of the loss is not the entropy.
        ({"entropy": -0.001, "actor/entropy": 0.01}, None),
    ]
    for scalars, declared in logged:
        run = start_run(http, str(scalars))
        http.patch(f"/v1/runs/{run.run}", json={"model_kind": "dense", "scalar_names": declared}).raise_for_status()
        send(run, 1, nearly_certain_without_entropy())
        run.put_scalars(1, scalars).raise_for_status()
        assert "k3_per_entropy" in names(run.get("steps/1/lint").raise_for_status().json()), scalars
        assert [warning["name"] for warning in run.get("lint").json()["window"]] == ["k3_per_entropy"]


def test_id_that_is_masked_once_in_a_step_is_found_over_steps(sender: Sender, http: httpx.Client) -> None:
    for step in range(1, 7):
        batch = batch_with_pad(step, share=0.0)
        row = int(np.flatnonzero(batch.response_lengths > 10)[step])
        ids = batch.response_token_ids.copy()
        ids[batch.response_offsets[row] + 1] = 0
        batch = replace(batch, response_token_ids=ids)
        send(sender, step, in_another_context(batch, after(batch, 0)))
        assert "mismatch_after_id" not in names(sender.get(f"steps/{step}/lint").raise_for_status().json())
    (warning,) = sender.get("lint").raise_for_status().json()["window"]
    assert (warning["name"], warning["evidence"]["token_id"]) == ("mismatch_after_id", 0)
    page = http.get(f"/pages/runs/{sender.run}/semantics").raise_for_status().text
    assert "Your mask drops token 0, which the model sampled" in page


def test_unreadable_evidence_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    part = LintPart.of(collect_evidence(make_batch(1)))
    damaged = replace(part, evidence=part.evidence[: len(part.evidence) // 2])
    with caplog.at_level(logging.WARNING):
        verdict = judge_step(1, 1, [damaged, part, damaged])
    assert verdict is not None
    assert verdict.report.shards == 1
    (message,) = caplog.messages
    assert "2 of 3 shards" in message
    assert "`foreshock remeasure`" in message
    assert judge_step(1, 1, [damaged]) is None
