"""Rewards that fall slowly, over 100 to 2,000 steps, and long healthy runs: the former are warned of, the latter not.

A decline is right if the run ends as a warning, or graver, whose headline says that the reward fell, since a step
before the middle of the fall. One whose tasks become harder is a warning whose advice names the tasks. A
third of the declines, those with the least hashes of their names, is held out: no constant was chosen with them.
`python -m benchmarks.diagnosis declines`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from benchmarks.bars import Line
from benchmarks.diagnosis.curves import noise_of
from benchmarks.diagnosis.histories import Floats, Story, closed, told
from foreshock.api.diagnosis import Diagnosis
from foreshock.diagnosis.quantities import REWARD_KEY
from foreshock.diagnosis.reward import RewardSettings, RewardState, advance_reward

SEED, SEEDS = 1160, 3
NEAR = 0.05
"""A fall may be dated so much of the run before it."""

HEALTHY_SEEDS, HEALTHY_STEPS = 40, 1500
LARGEST_WARNINGS_PER_1000 = 1.0
LEAST_RIGHT, LEAST_HELD_OUT = 0.9, 0.8


@dataclass(frozen=True, slots=True)
class Decline:
    """The mean reward at each step, [S], from 0 to 1, and where it falls; `rollouts` of a step, and further noise.

    `deviation` and `autocorrelation` are those of the noise; `every` is the distance of two logged steps; the reward is
    `low` + (`high` − `low`) × its level. `harder`: the tasks change, which was not announced unless in `announced`.
    """

    level: Floats
    first: int
    last: int
    rollouts: int = 256
    deviation: float = 0.0
    autocorrelation: float = 0.0
    every: int = 1
    low: float = 0.0
    high: float = 1.0
    harder: bool = False
    announced: tuple[int, ...] = ()


def _line(steps: int, *points: tuple[int, float]) -> Floats:
    """Return the values of a broken line through (step, value) at the steps 1 to `steps`."""
    at, values = np.array(points, np.float64).T
    return np.asarray(np.interp(np.arange(1, steps + 1), at, values))


def _stairs(steps: int, start: int, every: int, factor: float, count: int) -> Floats:
    done = np.clip((np.arange(1, steps + 1) - start) // every + 1, 0, count)
    return np.asarray(0.65 * factor**done)


def _saturating(steps: int, start: int, scale: float, low: float) -> Floats:
    return low + (0.65 - low) * np.exp(-np.clip(np.arange(1, steps + 1) - start, 0, None) / scale)


def _tasks(steps: int, at: tuple[int, ...], drop: float) -> Floats:
    """Return rewards that rise within a task and fall at each new one."""
    step, level = np.arange(1, steps + 1), np.full(steps, 0.7)
    for first in at:
        since = np.clip((step - first) / 250, 0, 1)
        level = np.where(step >= first, level * (drop + (1.0 - drop) * 0.4 * since), level)
    return level


_WAVES = 0.04 * np.sin(np.arange(900) / 8.0)
DECLINES: Mapping[str, Decline] = {
    "linear over 100": Decline(_line(400, (1, 0.4), (200, 0.65), (260, 0.65), (360, 0.4)), 260, 360),
    "linear over 250": Decline(_line(600, (1, 0.3), (250, 0.65), (350, 0.65), (600, 0.4)), 350, 600),
    "linear over 1,000": Decline(_line(1500, (1, 0.3), (300, 0.6), (500, 0.6), (1500, 0.36)), 500, 1500),
    "linear over 2,000": Decline(_line(2600, (1, 0.3), (300, 0.6), (600, 0.6), (2600, 0.36)), 600, 2600),
    "at once after its best": Decline(_line(900, (1, 0.2), (300, 0.7), (900, 0.42)), 300, 900),
    "from the first step on": Decline(_line(800, (1, 0.6), (800, 0.3)), 1, 800),
    "four stairs": Decline(_stairs(700, 250, 100, 0.89, 4), 250, 650),
    "eight stairs": Decline(_stairs(1600, 300, 150, 0.94, 8), 300, 1500),
    "saturating, 80": Decline(_saturating(600, 300, 80.0, 0.4), 300, 540),
    "saturating, 400": Decline(_saturating(1800, 500, 400.0, 0.35), 500, 1700),
    "noise that lasts": Decline(
        _line(900, (1, 0.6), (400, 0.6), (900, 0.33)), 400, 900, deviation=0.04, autocorrelation=0.9
    ),
    "noise without memory": Decline(_line(800, (1, 0.6), (300, 0.6), (800, 0.35)), 300, 800, deviation=0.1),
    "few rollouts": Decline(_line(900, (1, 0.5), (400, 0.5), (900, 0.27)), 400, 900, rollouts=16),
    "with waves": Decline(_line(900, (1, 0.6), (350, 0.6), (900, 0.35)) + _WAVES, 350, 900),
    "from −1 to 1": Decline(_line(700, (1, 0.6), (300, 0.85), (700, 0.6)), 300, 700, low=-1.0),
    "of another scale": Decline(_line(800, (1, 0.5), (300, 0.8), (800, 0.5)), 300, 800, high=12.0),
    "every tenth step": Decline(_line(1600, (1, 0.4), (600, 0.65), (1600, 0.38)), 600, 1600, every=10),
    "found low, then back in part": Decline(
        _line(1000, (1, 0.6), (300, 0.6), (700, 0.33), (1000, 0.4)), 300, 700
    ),
    "harder tasks": Decline(_tasks(900, (300, 600), 0.78), 300, 620, harder=True),
    "much harder tasks": Decline(_tasks(700, (400,), 0.6), 395, 420, harder=True),
    "harder tasks, announced": Decline(_tasks(900, (300, 600), 0.78), 0, 0, announced=(300, 600)),
}  # fmt: skip


def held_out() -> frozenset[str]:
    """Return the names of the declines that are held out."""
    by_hash = sorted(DECLINES, key=lambda each: sha256(each.encode()).hexdigest())
    return frozenset(by_hash[: len(by_hash) // 3])


def story_of(decline: Decline, random: np.random.Generator) -> Story:
    """Return a run with this reward, whose mismatch is healthy throughout."""
    count = decline.level.size
    level = np.clip(decline.level + noise_of(decline.deviation, decline.autocorrelation, count, random), 0.0, 1.0)
    rewards = decline.low + (decline.high - decline.low) * random.binomial(decline.rollouts, level) / decline.rollouts
    steps = [
        replace(
            step, values={**step.values, REWARD_KEY: float(reward)}, rebaseline=step.step in decline.announced
        )
        for step, reward in zip(closed(random, np.full(count, 3e-4)), rewards, strict=True)
    ][decline.every - 1 :: decline.every]  # fmt: skip
    return Story("", steps, lambda found: is_right(found, decline))


def is_right(found: Diagnosis, decline: Decline) -> bool:
    """Return whether the diagnosis at the end of the run says what happened."""
    if decline.announced:
        return found.verdict == "healthy"
    if found.verdict not in ("warning", "critical") or "the reward fell" not in found.headline or found.since is None:
        return False
    latest = decline.last if decline.harder else (decline.first + decline.last) / 2
    is_dated = decline.first - NEAR * decline.level.size <= found.since <= latest
    return is_dated and (not decline.harder or (found.verdict == "warning" and "task" in found.next_steps[0]))


def _healthy(kind: str, random: np.random.Generator) -> Floats:
    step = np.arange(HEALTHY_STEPS)
    level = np.full(HEALTHY_STEPS, 0.1 if kind == "rare" else random.uniform(0.3, 0.7))
    rollouts = int(random.choice([16, 64, 256]))
    if kind == "rising":
        level = level * (0.5 + np.minimum(step / random.uniform(200, 1500), 1.0))
    elif kind == "saturating, with a little fall":
        level = level * (1.0 - 0.6 * np.exp(-step / 100.0)) * (1.0 - 0.12 * step / HEALTHY_STEPS)
    elif kind == "slow waves":
        # The largest fall is by 21 % of the best.
        level = level * (1.0 + 0.12 * np.sin(2.0 * np.pi * step / random.uniform(60.0, 600.0)))
    elif kind.startswith("wander"):
        phi = float(kind.rpartition(" ")[2])
        level = level * np.exp(noise_of(0.1, phi, HEALTHY_STEPS, random))
    return float(random.choice([1.0, 10.0])) * random.binomial(rollouts, np.clip(level, 0.0, 1.0)) / rollouts


HEALTHY = (
    "flat", "rising", "saturating, with a little fall", "slow waves", "wander 0.9", "wander 0.97", "wander 0.99",
    "rare",
)  # fmt: skip


def warnings_of(rewards: Floats) -> int:
    """Return how many times a fall or a collapse of the reward is found."""
    state, settings, fired = RewardState(), RewardSettings(), 0
    for step, reward in enumerate(rewards.tolist(), start=1):
        state, events = advance_reward(state, step, reward, settings)
        fired += sum(event.change == "fired" for event in events)
    return fired


def measure_healthy(kind: str) -> float:
    """Return the warnings per 1,000 steps of healthy runs of a kind."""
    fired = sum(
        warnings_of(_healthy(kind, np.random.default_rng([SEED, 1, HEALTHY.index(kind), number])))
        for number in range(HEALTHY_SEEDS)
    )
    return 1000.0 * fired / (HEALTHY_SEEDS * HEALTHY_STEPS)


def measure(chosen: Callable[[str], bool] = lambda _: True) -> list[Line]:
    """Measure the declines with a chosen name, and the healthy runs."""
    apart = held_out()
    right: list[bool] = []
    held: list[bool] = []
    for number, (name, decline) in enumerate(DECLINES.items()):
        for seed in range(SEEDS if chosen(name) else 0):
            found, _, _ = told(story_of(decline, np.random.default_rng([SEED, number, seed])))
            (held if name in apart else right).append(is_right(found, decline))
            word = "right" if is_right(found, decline) else "wrong"
            print(f"{name:30} {'held out' if name in apart else '':9} {word:6} {found.headline}", flush=True)
    lines = [
        Line(
            "declines_right", f"of {len(right)} slow declines, right", sum(right), LEAST_RIGHT * len(right),
            at_least=True,
        ),
        Line(
            "declines_held_out", f"of {len(held)} held out, right", sum(held), LEAST_HELD_OUT * len(held), at_least=True
        ),
    ]  # fmt: skip
    for kind in HEALTHY:
        key, rate = kind.replace(",", "").replace(" ", "_"), measure_healthy(kind)
        lines.append(
            Line(f"declines_false_{key}", f"{kind}: warnings per 1,000 steps", rate, LARGEST_WARNINGS_PER_1000)
        )
    return lines
