"""What became of each run, and how the arms compare over the same seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from examples.closed_loop.arms import scales_of
from examples.closed_loop.plan import ARMS, Arm, Plan, plans
from examples.collapses.labels import label
from examples.collapses.results import Result
from foreshock.diagnosis.quantities import REWARD_KEY

RESAMPLES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    plan: Plan
    collapse: int | None
    last_reward: float
    """Mean reward of the last fifth of the steps."""
    learning_rate_share: float
    """Σ η as a share of that of the constant arm."""
    first_change: int | None
    """The first step whose scale is below 1; None: none."""
    scales: tuple[float, ...]
    """The factor on η₀ at each step."""


@dataclass(frozen=True, slots=True)
class ArmOutcome:
    """One arm of a setting over its seeds."""

    arm: Arm
    runs: int
    collapsed: int
    last_reward: float
    difference: float
    """Mean of the last rewards minus those of the constant arm, over the seeds that both have."""
    difference_interval: tuple[float, float]
    learning_rate_share: float


def outcome_of(plan: Plan, result: Result) -> Outcome:
    """Return what became of a run."""
    rewards = result.columns[REWARD_KEY].astype(np.float64)
    scales = scales_of(result)
    planned = plan.settings.steps
    return Outcome(
        plan=plan,
        collapse=label(result.steps.tolist(), rewards.tolist()),
        # A run that ended early, with weights that are not finite, has no reward in the rest.
        last_reward=float(rewards[result.steps > planned - planned // 5].sum() / (planned // 5)),
        learning_rate_share=math.fsum(scales) / planned,
        first_change=next((int(step) for step, scale in zip(result.steps, scales, strict=True) if scale < 1.0), None),
        scales=tuple(scales),
    )


def outcomes(results: Mapping[str, Result], seeds: int) -> list[Outcome]:
    """Return the outcomes of the finished runs, in the order of the plan."""
    return [outcome_of(plan, results[plan.name]) for plan in plans(seeds) if plan.name in results]


def compared_seeds(found: Iterable[Outcome], setting: str) -> list[int]:
    """Return the seeds of a setting that the constant arm and the advice have."""
    done = {(each.plan.arm, each.plan.seed) for each in found if each.plan.setting.name == setting}
    return sorted(seed for arm, seed in done if arm == "advice" and ("constant", seed) in done)


def arms_with(found: Iterable[Outcome], setting: str, seeds: Sequence[int]) -> list[Arm]:
    """Return the arms that have all of these seeds; the others are not measured yet."""
    done = {(each.plan.arm, each.plan.seed) for each in found if each.plan.setting.name == setting}
    return [arm for arm in ARMS if seeds and all((arm, seed) in done for seed in seeds)]


def best_safe_arm(found: Sequence[Outcome], setting: str, seeds: Sequence[int]) -> Arm:
    """Return the arm with mismatch in which the fewest seeds collapsed; of several, that with the best last reward."""
    return min(
        (arm for arm in arms_with(found, setting, seeds) if arm != "twin"),
        key=lambda arm: (
            sum(each.collapse is not None for each in _arm(found, setting, arm, seeds)),
            -_mean(each.last_reward for each in _arm(found, setting, arm, seeds)),
        ),
    )


def compare(found: Sequence[Outcome], setting: str, seeds: Sequence[int]) -> list[ArmOutcome]:
    """Return every arm that has all of the seeds, which must not be empty."""
    constant = [each.last_reward for each in _arm(found, setting, "constant", seeds)]
    compared = []
    for arm in arms_with(found, setting, seeds):
        mine = _arm(found, setting, arm, seeds)
        rewards = [each.last_reward for each in mine]
        differences = np.subtract(rewards, constant)
        compared.append(
            ArmOutcome(
                arm=arm,
                runs=len(mine),
                collapsed=sum(each.collapse is not None for each in mine),
                last_reward=_mean(rewards),
                difference=float(differences.mean()),
                difference_interval=paired_interval(differences),
                learning_rate_share=_mean(each.learning_rate_share for each in mine),
            )
        )
    return compared


def paired_interval(differences: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean over seeds; ±inf for fewer than two."""
    values = np.asarray(differences, np.float64)
    if values.size < 2:
        return -math.inf, math.inf
    drawn = np.random.default_rng(values.size).integers(values.size, size=(RESAMPLES, values.size))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _of(found: Iterable[Outcome], setting: str) -> list[Outcome]:
    return [each for each in found if each.plan.setting.name == setting]


def _arm(found: Iterable[Outcome], setting: str, arm: Arm, seeds: Sequence[int]) -> list[Outcome]:
    """Return an arm's outcomes in the order of ``seeds``."""
    by_seed = {each.plan.seed: each for each in _of(found, setting) if each.plan.arm == arm}
    return [by_seed[seed] for seed in seeds]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)
