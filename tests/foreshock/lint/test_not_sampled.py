"""Tokens that the model did not sample: named if unmasked and unlikely, whatever else the batch has."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.lint.healthy import Policy, healthy_batch
from tests.foreshock.lint.test_corruptions import not_checked, only

NAME = "tokens_not_sampled"


def forced(batch: RolloutBatch, places: Any, mean: float = -9.0, token_id: int = 70) -> RolloutBatch:
    """Return a batch in which a harness wrote an id at some places, which both sides score as an unlikely token."""
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    random = np.random.default_rng(0)
    mu, pi, ids = batch.rollout_log_probs.copy(), batch.trainer_log_probs.copy(), batch.response_token_ids.copy()
    mu[places] = random.normal(mean, 1.0, mu[places].size)
    pi[places] = mu[places] + random.normal(0, 0.02, mu[places].size)
    ids[places] = token_id
    return replace(batch, rollout_log_probs=mu, trainer_log_probs=pi, response_token_ids=ids)


def ends(batch: RolloutBatch) -> Any:
    return batch.response_offsets[1:] - 1


def test_appended_end_is_named_with_its_place() -> None:
    batch = healthy_batch(1)
    found = only(lint_batch(forced(batch, ends(batch))), NAME)
    assert found.title.startswith("tokens of id 70 were not sampled by the model (log μ ≤ −")
    assert "of 128 rollouts" in found.seen
    assert "each time at the end of the response" in found.seen
    assert found.evidence["tokens"] > 100 * found.evidence["expected"]
    assert found.where[0].text.startswith("id 70, log μ -")


def test_forced_token_before_tool_output_and_at_one_position_are_told() -> None:
    batch = healthy_batch(1, longest=60)
    long = np.flatnonzero(batch.response_lengths > 20)
    places = batch.response_offsets[long] + 12
    assert "each time at token 12 of the response" in only(lint_batch(forced(batch, places)), NAME).seen
    mask = np.ones(batch.num_tokens, np.uint8)
    mask[places + 1] = 0
    assert batch.rollout_log_probs is not None
    mu = np.where(mask, batch.rollout_log_probs, 0)
    masked = lint_batch(forced(replace(batch, rollout_log_probs=mu, response_mask=mask), places))
    assert "each time before masked tokens" in only(masked, NAME).seen


def test_first_tokens_are_compared_with_the_number_of_rollouts() -> None:
    batch = healthy_batch(1, longest=60)
    few = np.arange(0, 128, 4)
    found = only(lint_batch(forced(batch, batch.response_offsets[few], -7.0)), NAME)
    assert "each time at the first token; at most" in found.seen
    assert found.evidence["expected"] < 1.001 * 128 * np.exp(-6)
    assert NAME not in {each.name for each in lint_batch(forced(batch, ends(batch)[few], -7.0)).warnings}


def test_masked_tokens_are_no_finding() -> None:
    batch = healthy_batch(1)
    mask = np.ones(batch.num_tokens, np.uint8)
    mask[ends(batch)] = 0
    assert NAME not in {
        each.name for each in lint_batch(replace(forced(batch, ends(batch)), response_mask=mask)).warnings
    }


def test_id_that_is_often_unlikely_and_was_sampled_is_no_finding() -> None:
    # At 20,000 tokens of their own distributions, one id of 4,000 has log μ of about −6, and comes up 50 times.
    random = np.random.default_rng(2)
    mu = np.where(random.random(20_000) < np.exp(-6), -6.1, -0.0025).astype(np.float32)
    ids = np.where(mu < -1, 70, random.integers(0, 60, mu.size))
    batch = RolloutBatch.from_arrays(
        [f"row-{row}" for row in range(100)], np.arange(100), np.arange(101), ids, np.arange(0, 20_001, 200),
        rollout_log_probs=mu, trainer_log_probs=mu - np.float32(1e-4),
    )  # fmt: skip
    assert (ids == 70).sum() > 30
    assert NAME not in {each.name for each in lint_batch(batch).warnings}


def test_few_tokens_of_many_rollouts_are_no_finding() -> None:
    batch = healthy_batch(1, groups=64, per_group=16)
    few = lint_batch(forced(batch, ends(batch)[::60], -14.0))
    assert NAME not in {each.name for each in few.warnings}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_shards_in_any_order_name_it_like_the_batch(order: tuple[int, ...]) -> None:
    whole = forced(healthy_batch(1, Policy(vocabulary=64)), ends(healthy_batch(1, Policy(vocabulary=64))))
    parts = [collect_evidence(whole.select(np.arange(start, 128, 4))) for start in order]
    merged, one = run_checks(reduce(LintEvidence.merge, parts)), lint_batch(whole)
    assert only(merged, NAME).seen == only(one, NAME).seen


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"rollout_log_probs": None}, "needs rollout_log_probs"),
        ({"attributes": BatchAttributes(temperature=1.5)}, "log μ may not be the sampling distribution"),
        ({"attributes": BatchAttributes(temperature=0.7, logprobs_mode="raw_logprobs")}, "log μ may not be"),
    ],
)
def test_unknown_sampler_is_not_checked(columns: dict[str, Any], why: str) -> None:
    batch = healthy_batch(1)
    assert not_checked(lint_batch(replace(forced(batch, ends(batch)), **columns)))[NAME].startswith(why)


def test_placeholders_copies_and_raw_log_probs_are_not_checked() -> None:
    batch = healthy_batch(1)
    copies = forced(batch, ends(batch)).select(np.repeat(np.arange(128), 2))
    twice = replace(copies, sample_ids=[f"row-{row}" for row in range(256)])
    assert "copies of others" in not_checked(lint_batch(twice))[NAME]
    assert "placeholders" in not_checked(lint_batch(forced(batch, ends(batch), -9999.0)))[NAME]
    hot = healthy_batch(
        0, Policy(sharpness=4.0, vocabulary=16, temperature=2.0), per_group=64, attributes=BatchAttributes()
    )
    report = lint_batch(hot)
    assert "raw_log_probs" in {each.name for each in report.warnings}
    assert "sampling distribution" in not_checked(report)[NAME]
