"""Corrections evaluated by a loop over tokens with math.fsum, without code of the library, and by the library."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from foreshock.corrections import Evaluation, Evaluator, Threshold
from foreshock.measures import Comparison
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import compared

Pairs = list[tuple[float, float]]  # w and ρ


def evaluate(name: str, of: RolloutBatch | Comparison, threshold: Threshold | None = None) -> Evaluation:
    """Return what the library finds for one correction."""
    comparison = compared(of) if isinstance(of, RolloutBatch) else of
    return Evaluator(comparison.statistics, comparison.summaries).evaluate(name, threshold)


@dataclass
class DirectSequence:
    """The measured tokens of one rollout with their d and advantages, and its logged values."""

    d: list[float]
    advantages: list[float]
    group: str | None
    reward: float
    length: int


def sequences_of(batch: RolloutBatch) -> list[DirectSequence]:
    """Return the rollouts that have a measured token."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    found = []
    for row in range(batch.num_rollouts):
        d, advantages, length = [], [], 0
        for index in range(int(batch.response_offsets[row]), int(batch.response_offsets[row + 1])):
            if batch.response_mask is not None and batch.response_mask[index] != 1:
                continue
            length += 1
            difference = float(batch.trainer_log_probs[index]) - float(batch.rollout_log_probs[index])
            if math.isfinite(difference):
                d.append(difference)
                advantage = math.nan
                if batch.advantage is not None:
                    advantage = float(batch.advantage[index if batch.advantage_per_token else row])
                advantages.append(advantage)
        if d:
            group = batch.group_ids[row] if batch.group_ids is not None else None
            reward = float(batch.reward[row]) if batch.reward is not None else math.nan
            found.append(DirectSequence(d, advantages, group, reward, length))
    return found


TOKEN_WEIGHTS: dict[str, Callable[[float, float, float], float]] = {
    "none": lambda ratio, low, high: 1.0,
    "token_is": lambda ratio, low, high: ratio,
    "token_tis": lambda ratio, low, high: min(ratio, high),
    "token_mis": lambda ratio, low, high: ratio if low <= ratio <= high else 0.0,
    "icepop": lambda ratio, low, high: ratio if low <= ratio <= high else 0.0,
    "token_mask": lambda ratio, low, high: 1.0 if low <= ratio <= high else 0.0,
}
DROPPING = ("token_mis", "icepop", "token_mask", "sequence_mis", "geo_mis", "k3_rs", "veto")


def direct_tokens(batch: RolloutBatch, name: str, low: float = 0.0, high: float = math.inf) -> dict[str, float]:
    """Return the figures of a token correction."""
    sequences = sequences_of(batch)
    pairs, products, touched_tokens = [], [], 0
    touched_sequences = []
    for sequence in sequences:
        touched = 0
        for d, advantage in zip(sequence.d, sequence.advantages, strict=True):
            ratio = math.exp(d)
            weight = TOKEN_WEIGHTS[name](ratio, low, high)
            pairs.append((weight, ratio))
            if not math.isnan(advantage):
                products.append((weight - ratio) * advantage)
            touched += not low <= ratio <= high
        touched_tokens += touched
        touched_sequences.append(touched > 0)
    drops = name in DROPPING
    return {
        "kept_tokens": 1 - touched_tokens / len(pairs) if drops else 1.0,
        "kept_sequences": 1 - sum(touched_sequences) / len(sequences) if drops else 1.0,
        "touched_tokens": touched_tokens / len(pairs),
        **_of_pairs(pairs),
        "token_distortion": mean([abs(weight - ratio) for weight, ratio in pairs]),
        "advantage_distortion": mean(products),
        **_affected(sequences, touched_sequences),
    }


def keeps(name: str, sequence: DirectSequence, low: float, high: float) -> bool:
    """Return True if a sequence correction keeps a sequence unchanged."""
    d = sequence.d
    k3 = [math.exp(value) - 1 - value for value in d]
    if name == "geo_mis":
        return low <= math.exp(math.fsum(d) / len(d)) <= high
    if name.startswith("k3_rs"):
        return {"mean": mean(k3), "sum": math.fsum(k3), "max": max(k3)}[name.removeprefix("k3_rs_")] <= high
    if name == "veto":
        return all(math.exp(value) >= low for value in d)
    return low <= math.exp(math.fsum(d)) <= high


def direct_sequences(batch: RolloutBatch, name: str, low: float = 0.0, high: float = math.inf) -> dict[str, float]:
    """Return the figures of a sequence correction."""
    sequences = sequences_of(batch)
    kept = [keeps(name, each, low, high) for each in sequences]
    drops = name.startswith(DROPPING)
    has_ratio = name in ("sequence_is", "sequence_tis", "sequence_mis")
    pairs, products, of_tokens = [], [], []
    for sequence, stays in zip(sequences, kept, strict=True):
        ratio = math.exp(math.fsum(sequence.d))
        weight = ratio if has_ratio else 1.0
        if not stays:
            weight = 0.0 if drops else high
        pairs.append((weight, ratio))
        if not math.isnan(sequence.advantages[0]):
            products.append((weight - ratio) * mean(sequence.advantages))
        of_tokens += [abs(weight - math.exp(d)) for d in sequence.d]
    tokens = sum(len(sequence.d) for sequence in sequences)
    beyond = sum(len(sequence.d) for sequence, stays in zip(sequences, kept, strict=True) if not stays)
    return {
        "kept_tokens": 1 - beyond / tokens if drops else 1.0, "kept_sequences": sum(kept) / len(kept) if drops else 1.0,
        "touched_tokens": beyond / tokens, **_of_pairs(pairs),
        "token_distortion": math.nan if has_ratio else mean(of_tokens), "advantage_distortion": mean(products),
        **_affected(sequences, [not stays for stays in kept]),
    }  # fmt: skip


def mean(values: list[float]) -> float:
    """Return the correctly rounded mean."""
    return math.fsum(values) / len(values) if values else math.nan


def _of_pairs(pairs: Pairs) -> dict[str, float]:
    weights = [weight for weight, _ in pairs]
    average = mean(weights)
    square = math.fsum(weight * weight for weight in weights)
    return {
        "mean": average,
        "variance": mean([(weight - average) ** 2 for weight in weights]),
        "effective_fraction": math.fsum(weights) ** 2 / (len(weights) * square) if square else math.nan,
        "distortion": mean([abs(weight - ratio) for weight, ratio in pairs]),
        "uncorrected_distortion": mean([abs(1 - ratio) for _, ratio in pairs]),
    }


def _affected(sequences: list[DirectSequence], touched: list[bool]) -> dict[str, float]:
    groups = defaultdict(list)
    for sequence, hit in zip(sequences, touched, strict=True):
        if sequence.group is not None:
            groups[sequence.group].append(hit)
    real = [hits for hits in groups.values() if len(hits) > 1]
    result: dict[str, float] = {
        "groups": len(real),
        "groups_touched": mean([float(any(hits)) for hits in real]),
        "groups_emptied": mean([float(all(hits)) for hits in real]),
    }
    for side, is_touched in (("touched", True), ("untouched", False)):
        chosen = [each for each, hit in zip(sequences, touched, strict=True) if hit is is_touched]
        result[f"{side}_sequences"] = len(chosen)
        result[f"{side}_reward"] = mean([each.reward for each in chosen if not np.isnan(each.reward)])
        result[f"{side}_length"] = mean([float(each.length) for each in chosen])
    return result


def flat(evaluation: Evaluation) -> dict[str, float]:
    """Return the figures of an evaluation under the names that the direct evaluation uses."""
    affected = evaluation.affected
    result: dict[str, float] = {
        "kept_tokens": evaluation.kept_tokens, "kept_sequences": evaluation.kept_sequences,
        "touched_tokens": evaluation.touched_tokens, "mean": evaluation.weights.mean,
        "variance": evaluation.weights.variance, "effective_fraction": evaluation.weights.effective_fraction,
        "distortion": evaluation.distortion, "uncorrected_distortion": evaluation.uncorrected_distortion,
        "token_distortion": evaluation.token_distortion, "advantage_distortion": evaluation.advantage_distortion,
        "groups": affected.groups, "groups_touched": affected.groups_touched, "groups_emptied": affected.groups_emptied,
    }  # fmt: skip
    for side, population in (("touched", affected.touched), ("untouched", affected.untouched)):
        result[f"{side}_sequences"] = population.sequences
        result[f"{side}_reward"] = population.reward_mean
        result[f"{side}_length"] = population.length_mean
    return result


def assert_same(found: Evaluation, expected: dict[str, float], relative: float = 1e-9, absolute: float = 1e-11) -> None:
    """Assert that every figure agrees; NaN equals NaN."""
    assert found.not_estimable is None
    assert flat(found) == pytest.approx(expected, rel=relative, abs=absolute, nan_ok=True)


def batch_of(d: list[list[float]], behaviour: float = -30.0, **columns: Any) -> RolloutBatch:
    """Return rollouts with these d = log π − log μ; `behaviour` is log μ, low enough for log π ≤ 0."""
    lengths = [len(part) for part in d]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mu = np.full(int(offsets[-1]), behaviour)
    pi = mu + np.array([value for part in d for value in part])
    assert (pi <= 0).all()
    assert math.isfinite(behaviour)
    return RolloutBatch.from_arrays(
        [f"sample-{row}" for row in range(len(d))], np.zeros(len(d), np.int32), np.arange(len(d) + 1),
        np.zeros(int(offsets[-1]), np.int32), offsets, rollout_log_probs=mu, trainer_log_probs=pi, **columns,
    )  # fmt: skip
