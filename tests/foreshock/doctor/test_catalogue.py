"""A fix of the catalogue mends the cause: it never asks for what the lint reports."""

import dataclasses
import re

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.catalogue import CATALOGUE
from foreshock.lint import lint_batch
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock.rollouts.attributes import LogprobsMode

_MODE = re.compile(r"logprobs.mode[ =]+(\w+)")


def _shaped() -> tuple[RolloutBatch, NDArray[np.float32]]:
    """Return rollouts sampled at top-p 0.7, with raw log-probs and entropies, and their processed log-probs."""
    random = np.random.default_rng(0)
    probabilities = np.sort(random.dirichlet(np.full(20, 0.5), 3_000))[:, ::-1]
    kept = (np.cumsum(probabilities, axis=1) - probabilities) < 0.7
    processed = np.where(kept, probabilities, 0.0)
    processed /= processed.sum(axis=1, keepdims=True)
    ids = (random.random(3_000)[:, None] > np.cumsum(processed, axis=1)).sum(axis=1)
    at = np.arange(3_000), ids
    raw = np.log(probabilities[at]).astype(np.float32)
    batch = RolloutBatch.from_arrays(
        sample_ids=[f"r{row}" for row in range(100)],
        prompt_token_ids=np.zeros(100, np.int32),
        prompt_offsets=np.arange(101),
        response_token_ids=ids.astype(np.int32),
        response_offsets=np.arange(101) * 30,
        group_ids=[f"g{row // 4}" for row in range(100)],
        rollout_log_probs=raw,
        trainer_log_probs=raw,
        entropy=-(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(axis=1).astype(np.float32),
    )
    return batch, np.log(processed[at]).astype(np.float32)


def test_no_fix_asks_for_a_mode_of_log_probs_that_the_lint_reports() -> None:
    raw, processed = _shaped()
    logged: dict[LogprobsMode, RolloutBatch] = {
        "raw_logprobs": raw,
        "processed_logprobs": dataclasses.replace(
            raw, rollout_log_probs=processed, trainer_log_probs=processed, entropy=None
        ),
    }
    reported = set()
    for mode, batch in logged.items():
        attributes = BatchAttributes(logprobs_mode=mode, temperature=1.0, top_p=0.7)
        found = lint_batch(dataclasses.replace(batch, attributes=attributes)).warnings
        reported |= {mode for each in found if each.name == "raw_log_probs"}
    assert reported == {"raw_logprobs"}
    asked = {mode for cause in CATALOGUE for fix in cause.fixes.values() for mode in _MODE.findall(fix)}
    assert asked == {"processed_logprobs"}
    assert not any("raw_logprobs" in fix for cause in CATALOGUE for fix in cause.fixes.values())


def test_no_fix_masks_tokens_that_the_model_sampled() -> None:
    masks = [fix for cause in CATALOGUE for fix in cause.fixes.values() if "response_mask" in fix]
    assert masks
    assert all("that the model did not sample, and only there" in fix for fix in masks)
