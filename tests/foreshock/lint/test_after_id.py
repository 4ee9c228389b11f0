"""An id at which the mismatch begins is named; one that large differences follow for another reason is not."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.lint.checks.after_id import CANDIDATES, AfterIds
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


CHAT_END, TOOL, PAD, ANSWER = 101, 102, 103, 104


def chat(*, tool_tokens: int = 20, opens_with: int | None = None, with_turn: bool = True) -> RolloutBatch:
    """Return responses of two turns in every second rollout, of one in the others: 16 prompts, 8 rollouts each.

    CHAT_END, which the model samples, ends each turn. The template and tool output between two turns are masked. One
    response in ten of either kind has the sampled id PAD in its first turn; `opens_with` is the first id of turn 2.
    """
    random = np.random.default_rng(5)
    ids, mask, turns, lengths = [], [], [], []
    for row in range(128):
        first, second = (random.integers(1, VOCABULARY, random.integers(20, 150)) for _ in range(2))
        if row % 10 in (3, 6):
            first[5] = PAD
        second[0] = opens_with or second[0]
        template = [TOOL, *random.integers(1, VOCABULARY, tool_tokens), CHAT_END, TOOL]
        parts = [[*first, CHAT_END], *([template, [*second, CHAT_END]] if row % 2 else [])]
        ids += [each for part in parts for each in part]
        mask += [number != 1 for number, part in enumerate(parts) for _ in part]
        turns += [min(number, 1) for number, part in enumerate(parts) for _ in part]
        lengths.append(sum(map(len, parts)))
    generated = np.array(mask)
    mu = np.where(generated, -random.exponential(0.6, generated.size), 0).astype(np.float32)
    d = np.where(generated, random.normal(0, 0.01, mu.size), 0).astype(np.float32)
    columns: dict[str, Any] = {"turn": np.array(turns, np.int16)} if with_turn else {}
    return RolloutBatch.from_arrays(
        [f"rollout-{row}" for row in range(128)],
        np.arange(128) % 16,
        np.arange(129),
        np.array(ids, np.int32),
        np.concatenate([[0], np.cumsum(lengths)]),
        rollout_log_probs=mu,
        trainer_log_probs=np.minimum(mu + d, 0),
        response_mask=generated.astype(np.uint8),
        group_ids=[f"prompt-{row % 16}" for row in range(128)],
        **columns,
    )


def second_turn(batch: RolloutBatch) -> np.ndarray:
    """Return True for the sampled tokens of turn 2, shape [T]."""
    return np.asarray(batch.generated & after(batch, TOOL))


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
    mask = ((np.arange(batch.num_tokens) % 7 != 3) | (batch.response_token_ids == 0)).astype(np.uint8)
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


@pytest.mark.parametrize(("tool_tokens", "opens_with"), [(0, ANSWER), (2, None), (20, ANSWER), (100, None)])
def test_a_turn_that_differs_is_blamed_on_no_token_of_its_template(tool_tokens: int, opens_with: int | None) -> None:
    batch = chat(tool_tokens=tool_tokens, opens_with=opens_with)
    faulty = in_another_context(batch, second_turn(batch))
    (warning,) = [each for each in lint_batch(faulty).warnings if each.severity != "info"]
    assert warning.name == "mismatch_by_place"
    assert "from turn 1 on" in warning.title
    assert names(batch) <= {"sampling_not_declared"}
    assert CHECK not in names(in_another_context(replace(batch, turn=None), second_turn(batch)))


def test_masked_occurrences_of_a_sampled_id_are_not_its_first() -> None:
    batch = chat()
    # Tool output of every rollout of two turns has the id too.
    inside = after(batch, TOOL) & (np.asarray(batch.response_mask) == 0) & (batch.response_token_ids < VOCABULARY)
    ids = np.where(inside, PAD, batch.response_token_ids).astype(np.int32)
    batch = replace(batch, response_token_ids=ids)
    sampled = replace(batch, response_token_ids=np.where(inside, 0, ids).astype(np.int32))
    chosen = after(sampled, PAD) & (np.asarray(batch.response_mask) != 0)
    (warning,) = [each for each in lint_batch(in_another_context(batch, chosen)).warnings if each.name == CHECK]
    assert (warning.evidence["token_id"], warning.evidence["tokens_after"]) == (PAD, chosen.sum())


def test_shards_in_any_order_give_the_same_finding() -> None:
    batch = batch_with_pad(share=0.3)
    faulty = in_another_context(batch, after(batch, 0))
    order = np.random.default_rng(1).permutation(faulty.num_rollouts)
    shards = [collect_evidence(faulty.select(rows)) for rows in np.array_split(order, 4)]
    found = set()
    for each in (shards, shards[::-1], [shards[2], shards[0], shards[3], shards[1]]):
        merged = LintEvidence.from_bytes(reduce(LintEvidence.merge, each).to_bytes())
        assert merged[AfterIds].by_id.keys.size <= 4 * CANDIDATES
        (warning,) = [each for each in run_checks(merged).warnings if each.name == CHECK]
        found.add((warning.seen, tuple(warning.evidence.items())))
    assert len(found) == 1
    ((_, numbers),) = found
    assert dict(numbers)["tokens_after"] == after(batch, 0).sum()


def test_healthy_evidence_has_no_candidates() -> None:
    assert collect_evidence(healthy_batch(3))[AfterIds].by_id.keys.size == 0
