"""Uploaded scores: invalid ones are refused with row and column and are not stored."""

import dataclasses
import hashlib
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.rollouts import RolloutBatch, ScoreBatch, decode_scores, encode_scores
from foreshock_service.platform.settings import Settings
from foreshock_service.replay.results import scores as stored_scores
from tests.service import working
from tests.service.sending import Sender, make_batch, problem_of
from tests.service.stored import list_files


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run whose step 1 waits to be probed."""
    return working.run_to_probe(http, 1, rollouts=6)


@pytest.fixture
def holder(run: Sender) -> working.LeaseHolder:
    """A worker with the job of `vllm.prefill` on that step."""
    working.ask_for_probe(run, 1).raise_for_status()
    return working.take_lease(run.http)


def good_scores(rollouts: RolloutBatch) -> ScoreBatch:
    return working.scores_of(rollouts, working.noisy(rollouts, 1))


def test_stored_scores_are_plain_parquet_that_never_changes(holder: working.LeaseHolder, settings: Settings) -> None:
    scores = good_scores(holder.rollouts())
    body = encode_scores(scores)
    receipt = holder.put_scores(body).json()
    assert receipt == {
        "status": "stored",
        "digest": "sha256:" + hashlib.sha256(body).hexdigest(),
        "rollouts": 6,
        "tokens": scores.num_tokens,
    }
    (file,) = Path(settings.store_url).glob("*/*/*/scores/*.parquet")
    stored = decode_scores(file.read_bytes())
    assert stored.sample_ids == scores.sample_ids
    assert np.array_equal(stored.log_probs, scores.log_probs)
    assert stored.fingerprint == scores.fingerprint


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_scores_that_do_not_fit_are_refused(holder: working.LeaseHolder, settings: Settings) -> None:
    rollouts = holder.rollouts()
    good, ids, offsets = good_scores(rollouts), rollouts.sample_ids, rollouts.response_offsets
    other = next(row for row in range(1, 6) if rollouts.response_lengths[row] != rollouts.response_lengths[0])
    swapped, fewer, positive = list(ids), offsets.copy(), good.log_probs.copy()
    swapped[0], swapped[other] = ids[other], ids[0]
    fewer[3:] -= 1
    positive[offsets[2]] = 0.5
    spoilt: list[tuple[dict[str, Any], int, str]] = [
        ({"sample_ids": [*ids[:4], "stranger", ids[5]]}, 4, "sample_id"),
        ({"log_probs": good.log_probs[:-1], "offsets": fewer}, 2, "log_probs"),
        ({"sample_ids": swapped}, 0, "log_probs"),
        ({"log_probs": positive}, 2, "log_probs"),
        ({"sample_ids": [*ids[:5], ids[1]]}, 5, "sample_id"),
    ]
    for change, row, column in spoilt:
        answer = holder.put_scores(dataclasses.replace(good, **change))
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (422, "urn:foreshock:problem:invalid-rollouts"), problem
        assert (problem["row"], problem["column"]) == (row, column)
    assert not list(Path(settings.store_url).glob("*/*/*/scores/*"))
    assert not [name for name in list_files(settings) if name.startswith("temporary/")]
    assert holder.complete().status_code == 409


def test_bodies_that_are_no_score_table_are_refused(holder: working.LeaseHolder) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"sample_id": ["a"], "log_probs": [[-1.0]]}), sink)
    for body in (b"", b"not parquet", sink.getvalue(), encode_scores(good_scores(holder.rollouts()))[:-9]):
        answer = holder.put_scores(body)
        assert answer.status_code == 422, answer.text
        assert answer.headers["content-type"] == "application/problem+json"


def test_a_fingerprint_that_cannot_be_stored_is_refused(holder: working.LeaseHolder) -> None:
    rollouts = holder.rollouts()
    answer = holder.put_scores(working.scores_of(rollouts, working.noisy(rollouts, 1), device_name="a\x00b"))
    assert answer.status_code == 422
    assert "fingerprint holds text that cannot be stored" in answer.json()["detail"]


def test_a_body_beyond_the_cap_is_refused(holder: working.LeaseHolder, settings: Settings) -> None:
    answer = holder.put_scores(b"x" * (settings.max_body_bytes + 1))
    assert answer.status_code == 413


def test_scores_of_another_scorer_are_refused(holder: working.LeaseHolder) -> None:
    answer = holder.put_scores(good_scores(holder.rollouts()), "torch.float32")
    assert problem_of(answer) == (422, "result-not-asked")
    variant = holder.put_scores(good_scores(holder.rollouts()), variant="rebatched")
    assert variant.status_code == 422


def test_scores_made_with_other_weights_are_refused(holder: working.LeaseHolder) -> None:
    rollouts = holder.rollouts()
    wrong = working.scores_of(rollouts, working.noisy(rollouts, 1), weights_digest="sha256:" + "00" * 32)
    answer = holder.put_scores(wrong)
    assert problem_of(answer) == (422, "wrong-fingerprint")
    right = working.scores_of(rollouts, working.noisy(rollouts, 1), weights_digest=working.WEIGHTS)
    assert holder.put_scores(right).status_code == 201


def test_scores_without_all_rollouts_of_the_job_are_refused(holder: working.LeaseHolder) -> None:
    rollouts = holder.rollouts()
    part = rollouts.select(np.arange(4))
    answer = holder.put_scores(working.scores_of(part, working.noisy(part, 1)))
    assert problem_of(answer) == (422, "invalid-rollouts")
    assert "2 of the job's 6 rollouts have no values" in answer.json()["detail"]
    assert holder.complete().json()["type"] == "urn:foreshock:problem:result-incomplete"


def test_of_two_uploads_checked_at_once_one_is_stored(
    holder: working.LeaseHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = holder.rollouts()
    prepared = threading.Barrier(2)
    check = stored_scores._check

    def check_together(*arguments: Any) -> Any:
        checked = check(*arguments)
        # Neither is committed before both were checked.
        prepared.wait(60)
        return checked

    monkeypatch.setattr(stored_scores, "_check", check_together)
    with ThreadPoolExecutor(2) as threads:
        answers = list(
            threads.map(
                lambda seed: holder.put_scores(working.scores_of(rollouts, working.noisy(rollouts, seed))), (1, 2)
            )
        )
    assert sorted(answer.status_code for answer in answers) == [201, 409]
    assert holder.complete().status_code == 204


def test_retry_discards_the_scores_of_the_failed_try(run: Sender, http: httpx.Client) -> None:
    working.ask_for_probe(run, 1).raise_for_status()
    first = working.take_lease(http, "first")
    rollouts = first.rollouts()
    first.put_scores(working.scores_of(rollouts, working.noisy(rollouts, 1))).raise_for_status()
    first.fail("retry").raise_for_status()
    second = working.take_lease(http, "second")
    # Nothing of the first try counts, and other bytes are no conflict.
    assert second.complete().json()["type"] == "urn:foreshock:problem:result-incomplete"
    assert second.put_scores(working.scores_of(rollouts, working.noisy(rollouts, 2))).status_code == 201
    assert second.complete().status_code == 204
    token = run.get("steps/1/tokens", comparison="vllm.prefill/rollout", sample_id=rollouts.sample_ids[0]).json()
    expected = working.noisy(rollouts, 2)[: len(token["items"])]
    shown = [each["log_probs"]["vllm.prefill"] for each in token["items"]]
    assert shown == pytest.approx(expected.tolist())


def test_token_header_is_required(holder: working.LeaseHolder) -> None:
    answer = holder.http.get(f"{holder.url}/rollouts")
    assert answer.status_code == 422
    assert "x-foreshock-lease-token" in answer.json()["detail"].lower()


def test_missing_token_file_is_410_for_worker_and_new_probe(
    holder: working.LeaseHolder, run: Sender, settings: Settings
) -> None:
    body = encode_scores(good_scores(holder.rollouts()))
    (file,) = Path(settings.store_url).glob("*/*/*/*.parquet")
    file.unlink()
    for answer in (holder.get_rollouts(), holder.put_scores(body), working.ask_for_probe(run, 1, max_rollouts=3)):
        assert problem_of(answer) == (410, "tokens-gone")
    # The same shard again restores it, and the job goes on.
    run.put_shard(1, make_batch(6)).raise_for_status()
    holder.get_rollouts().raise_for_status()
    holder.put_scores(body).raise_for_status()
