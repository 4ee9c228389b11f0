"""Ids that the engine alone allows at the first tokens: a grammar, a prefix, or tokens that it did not score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.rollouts import RolloutBatch
from tests.foreshock.lint.conftest import real_mu
from tests.foreshock.lint.healthy import Policy, healthy_batch, log_softmax
from tests.foreshock.lint.test_corruptions import names, only

WIDE = Policy(sharpness=1.5, vocabulary=64)


def restricted(batch: RolloutBatch, allowed: Mapping[int, Sequence[int]], seed: int = 3) -> RolloutBatch:
    """Return a batch whose engine samples only the allowed ids at some places; the trainer knows all ids."""
    random = np.random.default_rng(seed)
    ids, mu, pi = batch.response_token_ids.copy(), real_mu(batch).copy(), np.array(batch.trainer_log_probs)
    for place, of_place in allowed.items():
        at = batch.response_offsets[:-1][batch.response_lengths > place] + place
        logits = random.normal(0, WIDE.sharpness, (at.size, WIDE.vocabulary))
        masked = np.full_like(logits, -np.inf)
        masked[:, of_place] = logits[:, of_place]
        sampled = log_softmax(masked)
        ids[at] = (random.random((at.size, 1)) > np.cumsum(np.exp(sampled), axis=1)).sum(1).clip(max=63)
        mu[at] = sampled[np.arange(at.size), ids[at]]
        pi[at] = log_softmax(logits + random.normal(0, WIDE.noise, logits.shape))[np.arange(at.size), ids[at]]
    mu = np.minimum(mu, 0.0)
    return replace(batch, response_token_ids=ids, rollout_log_probs=mu, trainer_log_probs=pi, entropy=None)


@pytest.mark.parametrize("seed", range(4))
def test_grammar_of_the_first_tokens_is_named_with_the_forced_id(seed: int) -> None:
    batch = restricted(healthy_batch(seed, WIDE), {0: [5, 8], 1: range(30, 42), 2: [6], 3: range(10, 40)})
    warning = only(lint_batch(batch), "banned_early")
    assert warning.title == "the engine alone restricts the ids at the first 4 tokens of responses"
    assert "At token 2 log μ is 0 exactly, always with id 6. It looks like a grammar" in warning.seen
    assert "min_tokens" not in warning.seen
    parts = [collect_evidence(batch.select(np.arange(part, 128, 4))) for part in range(4)]
    assert only(run_checks(reduce(LintEvidence.merge, parts)), "banned_early").title == warning.title


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", [0, 3, 9])
def test_one_id_that_is_always_at_a_place_is_forced(seed: int, place: int) -> None:
    warning = only(lint_batch(restricted(healthy_batch(seed, WIDE), {place: [7]})), "banned_early")
    assert f"At token {place} log μ is 0 exactly, always with id 7." in warning.seen
    assert "set the response mask to 0" in warning.remedy


def test_tokens_with_several_ids_and_no_log_mu_are_not_scored() -> None:
    batch = healthy_batch(3, WIDE)
    mu = real_mu(batch).copy()
    mu[batch.response_offsets[:-1]] = 0.0
    assert "tokens_without_engine" in names(lint_batch(replace(batch, rollout_log_probs=mu)))
    assert "banned_early" not in names(lint_batch(replace(batch, rollout_log_probs=mu)))


def test_one_id_without_log_mu_at_the_ends_is_not_forced() -> None:
    batch = healthy_batch(4, WIDE, longest=12)
    ends = batch.response_offsets[1:] - 1
    mu, ids = real_mu(batch).copy(), batch.response_token_ids.copy()
    mu[ends], ids[ends] = 0.0, 63
    report = lint_batch(replace(batch, rollout_log_probs=mu, response_token_ids=ids))
    assert "tokens_without_engine" in names(report)
    assert "banned_early" not in names(report)
