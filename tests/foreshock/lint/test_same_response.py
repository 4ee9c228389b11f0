"""The same response to most prompts is named; short answers, and equal samples of one prompt, are not."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.rollouts import RolloutBatch
from tests.foreshock.lint.healthy import healthy_batch
from tests.foreshock.lint.test_corruptions import not_checked

NAME = "same_response"


def collapsed(share: float, length: int = 12, groups: int = 8) -> RolloutBatch:
    """Return rollouts of 12 tokens of which the first of each prompt have one and the same response."""
    whole = healthy_batch(1, groups=groups, longest=1)
    random = np.random.default_rng(0)
    ids = random.integers(0, 12, (whole.num_rollouts, length))
    ids[np.arange(whole.num_rollouts) % 16 < 16 * share] = np.arange(length) % 12
    mu = random.normal(-0.5, 0.1, ids.size).clip(max=-0.01).astype(np.float32)
    return replace(
        whole, response_token_ids=ids.ravel().astype(np.int32), response_offsets=np.arange(ids.shape[0] + 1) * length,
        rollout_log_probs=mu, trainer_log_probs=mu + np.float32(1e-4), entropy=None,
    )  # fmt: skip


def found(batch: RolloutBatch) -> dict[str, str]:
    return {each.name: each.title for each in lint_batch(batch).warnings}


def test_one_text_for_all_prompts_is_named_with_its_share() -> None:
    assert found(collapsed(0.75))[NAME] == "75 % of the responses are the same text, whatever the prompt"
    assert "128 of 128 rollouts, of 8 different prompts" in lint_batch(collapsed(1.0)).warnings[0].seen


@pytest.mark.parametrize("batch", [collapsed(0.4), collapsed(1.0, 5)], ids=["less than half", "short answers"])
def test_less_and_short_answers_are_no_finding(batch: RolloutBatch) -> None:
    assert NAME not in found(batch)


def test_same_response_to_one_prompt_only_is_no_finding() -> None:
    batch = collapsed(1.0)
    ids = batch.response_token_ids.reshape(128, -1).copy()
    ids[:, 0] = np.arange(128) // 16
    assert NAME not in found(replace(batch, response_token_ids=ids.ravel()))
    assert not_checked(lint_batch(collapsed(1.0, groups=3)))[NAME] == "needs 4 different prompts"


def test_shards_give_the_finding_of_the_batch_and_a_run_none() -> None:
    whole = collapsed(0.75)
    merged = reduce(LintEvidence.merge, (collect_evidence(whole.select(np.arange(part, 128, 3))) for part in range(3)))
    assert [each.seen for each in run_checks(merged).warnings] == [each.seen for each in lint_batch(whole).warnings]
    across = {check.name: check.why for check in run_checks(merged.across_steps()).not_checked}
    assert across[NAME] == "checked within a step, not across steps"
    assert not_checked(lint_batch(replace(whole, rollout_log_probs=None)))[NAME] == "needs rollout_log_probs"
