"""Names in a policy that is nearly certain: a few tokens have most of the mismatch, and all others tell the cause."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.doctor import Change, examine
from foreshock.doctor.naming import NAMED_SHARE
from foreshock.rollouts import RolloutBatch
from tests.foreshock.doctor.fake import FakeExperimenter, logged, rollouts

_CERTAIN = 0.97
_MARGIN = 14.0
_ROUNDING = 0.02


class _CertainPolicy(FakeExperimenter):
    """Most tokens have probabilities near 1; how far rounding and other weights move logits differs by token."""

    def __init__(self, batch: RolloutBatch, update: float) -> None:
        super().__init__(batch)
        self._update = update
        random = np.random.default_rng(9)
        self.sensitivity = np.exp(0.8 * random.normal(size=batch.num_tokens))[:, None]
        self._margins = np.where(random.random(batch.num_tokens) < _CERTAIN, _MARGIN, 0.0)

    def logits(self, change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        if rows:
            return super().logits(change, rows)
        name = change.get("weights")
        moved = super().logits(change).astype(np.float64) - 2.0 * self._random(0, name)
        if name != "step_10":
            moved += self._update * self._random(4, name)
        found = 2.0 * self._random(0, "step_10") + self.sensitivity * moved
        found[np.arange(self.batch.num_tokens), self.batch.response_token_ids] += self._margins
        return found.astype(np.float32)

    def logged(self, *, noise: int | None = None, **change: Any) -> NDArray[np.float32]:
        """Return log-probs of a side; `noise`: the seed of other kernels, which round otherwise."""
        values = {"weights": "step_10", "precision": "bfloat16"} | change
        found = self.logits(Change.of(**values)).astype(np.float64)
        if noise is not None:
            found += _ROUNDING * self.sensitivity * np.random.default_rng(noise).normal(size=found.shape)
        found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
        own = found[np.arange(self.batch.num_tokens), self.batch.response_token_ids]
        log_probs: NDArray[np.float32] = np.minimum(own, 0).astype(np.float32)
        return log_probs


def _rollouts(seed: int) -> RolloutBatch:
    return rollouts(seed, 128, of_each=16, lengths=(20, 28))


@pytest.mark.parametrize("update", [0.1, 0.05])
def test_weights_of_the_step_before_are_named_if_they_explain_nine_tenths(update: float) -> None:
    """Of the smaller update a quarter of the difference is ordinary rounding: nothing is named."""
    lab = _CertainPolicy(_rollouts(0), update=update)
    mu, pi = lab.logged(weights="step_7", noise=5), lab.logged(precision="autocast")
    report = examine(replace(lab.batch, rollout_log_probs=mu, trainer_log_probs=pi), lab)
    named = [("rollout", "other_weights", "step_7")] if update == 0.1 else []
    assert [(each.side, each.cause, each.value) for each in report.causes] == named
    assert all(each.share >= NAMED_SHARE for each in report.causes)


def test_other_kernels_with_the_announced_weights_are_rounding() -> None:
    lab = _CertainPolicy(_rollouts(1), update=0.05)
    mu, pi = lab.logged(noise=5), lab.logged(precision="autocast")
    report = examine(replace(lab.batch, rollout_log_probs=mu, trainer_log_probs=pi), lab)
    assert [each.kind for each in report.findings] == ["expected"]


def test_no_second_cause_is_named_for_what_a_few_tokens_leave_within_rounding() -> None:
    """One token that rounding decides has most of what the cause leaves: any fitted parameter explains it."""
    lab = _CertainPolicy(_rollouts(0), update=0.2)
    mu = lab.logged(weights="step_7", noise=5)
    uncertain = int(np.flatnonzero(mu < -1)[0])
    mu[uncertain] -= 0.3
    report = examine(replace(lab.batch, rollout_log_probs=mu, trainer_log_probs=lab.logged(precision="autocast")), lab)
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", "other_weights")]


def test_zeros_in_a_single_prompt_are_named() -> None:
    """A third of the resampled prompts have none, but a change of data that reproduces all exactly is no chance."""
    lab = _CertainPolicy(_rollouts(0), update=0.0)
    pi = lab.logged(precision="autocast")
    in_first_prompt = np.arange(pi.size) < int(lab.batch.response_offsets[16])
    zeroed = np.where(in_first_prompt & (pi < -0.5), np.float32(0), pi)
    report = examine(replace(lab.batch, rollout_log_probs=lab.logged(noise=5), trainer_log_probs=zeroed), lab)
    assert [(each.side, each.cause) for each in report.causes] == [("trainer", "zeros")]


def test_what_one_id_alone_differs_by_names_no_change_of_the_computation() -> None:
    """A policy that repeats one id has nearly one d, which the positions of the trainer would fit as well as any."""
    batch = rollouts(3)
    repeated = replace(batch, response_token_ids=np.full_like(batch.response_token_ids, 7))
    for each, is_named in ((batch, True), (repeated, False)):
        lab = FakeExperimenter(each)
        logs = replace(each, rollout_log_probs=logged(lab), trainer_log_probs=logged(lab, positions="zero"))
        assert ("positions" in [found.cause for found in examine(logs, lab).causes]) == is_named
