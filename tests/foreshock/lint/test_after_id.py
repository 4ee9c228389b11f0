"""An id at which the mismatch begins is named; one that large differences follow for another reason is not."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.lint.after_id import CANDIDATES
from foreshock.rollouts import RolloutBatch
from tests.foreshock.lint.healthy import Policy, healthy_batch

CHECK = "mismatch_after_id"
VOCABULARY = 100


def batch_with_pad(seed: int = 0, token_id: int = 0, share: float = 0.1, **columns: Any) -> RolloutBatch:
    """Return a healthy batch in which `token_id` stands in a share of the responses, once, and nowhere else."""
    batch = healthy_batch(seed, Policy(sharpness=2.0, vocabulary=VOCABULARY), longest=30, **columns)
    random = np.random.default_rng(seed)
    ids = np.where(batch.response_token_ids == token_id, 50, batch.response_token_ids)
    for row in np.flatnonzero((random.random(batch.num_rollouts) < share) & (batch.response_lengths > 4)):
        ids[batch.response_offsets[row] + 1] = token_id
    return replace(batch, response_token_ids=ids.astype(np.int32))


def after(batch: RolloutBatch, token_id: int) -> np.ndarray:
    """Return True for the tokens after the first occurrence of an id in their response, shape [T]."""
    found = np.zeros(batch.num_tokens, bool)
    for start, end in zip(batch.response_offsets[:-1], batch.response_offsets[1:], strict=True):
        places = np.flatnonzero(batch.response_token_ids[start:end] == token_id)
        if places.size:
            found[start + places[0] + 1 : end] = True
    return found


def in_another_context(batch: RolloutBatch, chosen: np.ndarray, seed: int = 9) -> RolloutBatch:
    """Return the batch with unrelated log-probs of the trainer at the chosen tokens [T]."""
    assert batch.trainer_log_probs is not None
    other = np.random.default_rng(seed).gamma(1.0, 2.0, batch.num_tokens).astype(np.float32)
    return replace(batch, trainer_log_probs=np.where(chosen, -other, batch.trainer_log_probs))


def names(batch: RolloutBatch) -> set[str]:
    return {warning.name for warning in lint_batch(batch).warnings}


@pytest.mark.parametrize("token_id", [0, 7, VOCABULARY - 1])
def test_masked_pad_id_is_named_with_its_number(token_id: int) -> None:
    batch = batch_with_pad(token_id=token_id)
    faulty = in_another_context(batch, after(batch, token_id))
    (warning,) = [each for each in lint_batch(faulty).warnings if each.name == CHECK]
    assert warning.severity == "critical"
    assert warning.evidence["token_id"] == token_id
    assert f"Your mask drops token {token_id}, which the model sampled" in warning.seen
    assert warning.evidence["tokens_after"] == after(batch, token_id).sum()
    assert all(each.text.startswith(f"id {token_id},") and each.token == 1 for each in warning.where)
    assert warning.where
    assert CHECK not in names(batch)


def test_masked_tokens_and_nan_are_not_counted() -> None:
    batch = batch_with_pad()
    faulty = in_another_context(batch, after(batch, 0))
    assert faulty.trainer_log_probs is not None
    mask = (np.arange(batch.num_tokens) % 7 != 3).astype(np.uint8)
    target = np.where(np.arange(batch.num_tokens) % 11 == 5, np.float32(np.nan), faulty.trainer_log_probs)
    damaged = replace(faulty, response_mask=mask, trainer_log_probs=target)
    (warning,) = [each for each in lint_batch(damaged).warnings if each.name == CHECK]
    counted = after(batch, 0) & (mask != 0) & np.isfinite(target)
    assert warning.evidence["tokens_after"] == counted.sum()


def test_few_large_differences_in_responses_with_a_rare_id_are_no_evidence() -> None:
    batch = batch_with_pad(share=0.02)
    rows = np.flatnonzero(
        [0 in response for response in np.split(batch.response_token_ids, batch.response_offsets[1:-1])]
    )
    chosen = after(batch, 0) & np.isin(np.repeat(np.arange(batch.num_rollouts), batch.response_lengths), rows[:2])
    assert CHECK not in names(in_another_context(batch, chosen))


def test_responses_that_differ_from_their_first_token_on_are_no_evidence_against_an_id() -> None:
    batch = batch_with_pad()
    rows = np.repeat(np.arange(batch.num_rollouts), batch.response_lengths)
    with_id = np.isin(rows, np.unique(rows[batch.response_token_ids == 0]))
    assert CHECK not in names(in_another_context(batch, with_id))


def test_id_of_nearly_every_response_is_not_blamed_for_an_uncertain_second_part() -> None:
    batch = batch_with_pad(share=2.0)
    assert CHECK not in names(in_another_context(batch, after(batch, 0)))


def test_id_of_one_prompt_is_not_blamed() -> None:
    batch = batch_with_pad(share=0.0)
    ids = batch.response_token_ids.copy()
    for row in range(16):  # the rollouts of the first prompt
        if batch.response_lengths[row] > 4:
            ids[batch.response_offsets[row] + 1] = 0
    batch = replace(batch, response_token_ids=ids)
    assert CHECK not in names(in_another_context(batch, after(batch, 0)))


@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0])
def test_healthy_batches_of_any_mismatch_are_clean(noise: float) -> None:
    for seed in range(10):
        policy = Policy(sharpness=2.0, vocabulary=VOCABULARY, noise=noise)
        assert CHECK not in names(healthy_batch(seed, policy, longest=60))


def test_shards_in_any_order_give_the_same_finding() -> None:
    batch = batch_with_pad(share=0.3)
    faulty = in_another_context(batch, after(batch, 0))
    order = np.random.default_rng(1).permutation(faulty.num_rollouts)
    shards = [collect_evidence(faulty.select(rows)) for rows in np.array_split(order, 4)]
    found = set()
    for each in (shards, shards[::-1], [shards[2], shards[0], shards[3], shards[1]]):
        merged = LintEvidence.from_bytes(reduce(LintEvidence.merge, each).to_bytes())
        assert merged.after_ids.keys.size <= 4 * CANDIDATES
        (warning,) = [each for each in run_checks(merged).warnings if each.name == CHECK]
        found.add((warning.seen, tuple(warning.evidence.items())))
    assert len(found) == 1
    ((_, numbers),) = found
    assert dict(numbers)["tokens_after"] == after(batch, 0).sum()


def test_healthy_evidence_has_no_candidates() -> None:
    assert collect_evidence(healthy_batch(3)).after_ids.keys.size == 0
