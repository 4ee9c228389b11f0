"""The online detectors of a collapsed reward (`reward_collapse`, critical) and of a falling one (`reward_fall`).

A collapse passes one of two tests.

- *A fall beyond the noise.* Every kept step is tried as the onset, of a sudden fall or of a ramp; the one that explains
  most is taken. The reward must be below half of its best and of its level before the onset, and the fall must be many
  standard deviations. The level of a ramp is extrapolated by a step and a half and allowed two standard errors: a steep
  ramp is found before two thirds of its fall, a slow one later.
- *The definition of a collapse (`collapse.py`) has held for ten observations*, in a series too noisy for the first
  test. The best of many noisy levels is high by chance. So the reward must also be slightly below its level before the
  onset and, unless the fall is three standard deviations, no higher than at the start of the run. A reward that has
  recovered from a collapse swings by itself: another one must be three standard deviations.

The noise is estimated from differences of values up to eight apart: a ramp is not noise, slow swings are.

The earlier stage (`reward_fall`, warning) is the first test at a quarter of the way, or a fall of the moving average: a
quarter of the way while the mismatch is critical beside the entropy, or most of the way whatever the mismatch. Without
the second test it is in time for 4 of the 36 collapses of the locked part of docs/collapses.md, with it for 13.

A fall over more rewards than are kept is looked for in the means of blocks, of which the whole run has at most 64: by a
quarter from the best level, with two standard errors, and far beyond what swings leave of a curve that rises and then
falls. Its onset is the bend of a line that is level and then falls.

Constants were chosen on generated curves, on the tuning part of `examples/collapses` and on the 13 labelled logs;
`make bench-diagnosis` measures the locked part and other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, NamedTuple

from foreshock.diagnosis.collapse import HELD_OBSERVATIONS, TRAILING_VALUES, floor_of
from foreshock.diagnosis.mismatch_order import mismatch_at_fall, mismatch_in_words, order_in_words
from foreshock.diagnosis.rule import Event
from foreshock.diagnosis.statistics import Noise, bend_of, neighbour_noise, step_noise, swing_about_peak
from foreshock.diagnosis.wording import reward_number
from foreshock.healthy_ranges import required_range
from foreshock.model_kind import ModelKind

FALL_RULE = "reward_fall"
COLLAPSE_RULE = "reward_collapse"

LITTLE_RECOVERY = 0.25
"""If more than this fraction of a fall has been recovered, sentences give the level found and the present one."""

MEDIAN_TO_MEAN = 1.25
"""Standard deviation of a median / of a mean, of normal values: √(π / 2)."""


def _per_entropy(model_kind: ModelKind | None) -> float:
    critical = required_range("k3_kl_per_entropy", model_kind).critical
    assert critical is not None
    return critical


def _healthy_k3(model_kind: ModelKind | None) -> float:
    return required_range("k3_kl", model_kind).warning or math.inf


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """The constants of the detectors. Falls are fractions of best − floor, deviations are of the noise."""

    fall: float = 0.25
    """A warning: half of the fall that is a collapse."""
    collapse: float = 0.5
    """The definition of a collapse (`collapse.py`)."""
    clearing_fall: float = 0.125
    """The warning clears once the fall is this small."""
    clearing_collapse: float = 0.4
    clearing_values: int = 2
    z: float = 5.0
    """Least standard deviations of a fall with a known floor; high, since the onset is chosen among many."""
    z_without_floor: float = 6.0
    """The same for rewards below −1: how far they can fall is not known."""
    z_of_definition: float = 0.3
    """Least standard deviations from the level before down to the present one if the definition holds."""
    z_above_start: float = 3.0
    """The same if the reward is still above its start, or has recovered from a collapse before."""
    least_reach: float = 2.8
    """best − floor in standard deviations of one value: a smaller one is noise around the floor."""
    start_values: int = 10
    """Rewards whose median is where the run started."""
    before_values: int = 20
    """Rewards before the onset that give the level; more would lower it in a rising run."""
    least_before: int = 5
    least_after: int = 3
    """Rewards before and since the onset."""
    ahead: float = 1.5
    """Steps by which a ramp is extrapolated."""
    allowance: float = 2.0
    """Standard errors of the level that must be below the threshold too."""
    noise_values: int = 24
    """The noise is that of the rewards before the onset if there are at least so many, else of all rewards."""
    kept_values: int = 128
    most_recoveries: int = 2
    """After so many recovered collapses the reward counts as swinging, and only the definition is tested."""
    rise_z: float = 3.0
    """The reward rises if the newest values are so many standard deviations above those `rise_values` before."""
    rise_values: int = 20
    """Values between the two levels of a rise: a run that learned some time ago does not rise any more."""
    average_weight: float = 0.2
    """Weight of the newest value in the moving averages."""
    average_start: int = 5
    """Rewards before the moving average may count as the best."""
    average_z: float = 3.0
    """Least standard deviations of a fall of the moving average while the mismatch is critical."""
    average_fall_alone: float = 0.6
    average_z_alone: float = 6.0
    """Least fall of the moving average, and its standard deviations, whatever the mismatch."""
    average_held: int = 2
    """Steps in a row of such a fall."""
    blocks: int = 64
    """Blocks of the whole run at most; then each two become one."""
    least_of_block: int = 4
    """Rewards of a block from which a slow fall is looked for: the other tests see the first 128 rewards."""
    level_blocks: int = 3
    """Blocks whose mean is a level of a slow fall."""
    slow_z: float = 7.0
    """A slow fall is at least so many times what a curve that rises and then falls leaves of the means of blocks."""
    per_entropy: float = _per_entropy(None)
    """k3 / entropy that is critical."""
    healthy_k3: float = _healthy_k3(None)
    """The largest healthy k3, in nats per token."""
    floor: float | None = None
    """The reward of a policy that learned nothing. None: that of `floor_of` if no reward was below −1, else best − the
    larger of |best| and best − lowest level."""

    @classmethod
    def for_model(cls, model_kind: ModelKind | None) -> RewardSettings:
        return cls(per_entropy=_per_entropy(model_kind), healthy_k3=_healthy_k3(model_kind))


class Block(NamedTuple):
    """Rewards in a row: the step of the first one, their number and sum, and number and sum of the measured k3."""

    step: int
    rewards: int = 0
    total: float = 0.0
    measured: int = 0
    k3: float = 0.0

    def with_next(self, later: Block) -> Block:
        """Return this block and a later one as one."""
        rewards, total = self.rewards + later.rewards, self.total + later.total
        return Block(self.step, rewards, total, self.measured + later.measured, self.k3 + later.k3)


@dataclass(frozen=True, slots=True)
class RewardState:
    """The newest rewards with their steps and k3, the levels of the run, and since when the alerts are open."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    mismatch: tuple[float | None, ...] = ()
    best: float | None = None
    lowest: float | None = None
    lowest_level: float | None = None
    first: tuple[float, ...] = ()
    held: int = 0
    average: float | None = None
    """Moving average of the reward; `best_average` is its best."""
    best_average: float | None = None
    average_per_entropy: float | None = None
    average_held: int = 0
    blocks: tuple[Block, ...] = ()
    """All rewards, `of_block` in each block; the last one may have fewer."""
    of_block: int = 1
    fall_step: int | None = None
    slow_before: float | None = None
    """The level before the open fall if it is a slow one."""
    fall_back: int = 0
    collapse_step: int | None = None
    collapse_back: int = 0
    recoveries: int = 0

    @property
    def is_low(self) -> bool:
        """Whether an alert is open."""
        return self.fall_step is not None or self.collapse_step is not None

    @property
    def lowers_rate(self) -> bool:
        """Whether an alert is open that lowers the learning rate: a slow fall may be one of harder tasks."""
        return self.is_low and (self.slow_before is None or self.collapse_step is not None)

    def forgotten(self) -> RewardState:
        """Return the state without any reward.

        An open alert stays open until the reward is back, so its levels are kept.
        """
        if not self.is_low:
            return RewardState()
        return replace(
            self, steps=(), values=(), mismatch=(), first=(), held=0, fall_back=0, collapse_back=0,
            average=None, best_average=None, average_per_entropy=None, average_held=0, blocks=(), of_block=1,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RewardState:
        fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
        return cls(**fields | {"blocks": tuple(Block(*each) for each in value["blocks"])})


def advance_reward(
    state: RewardState,
    step: int,
    reward: float | None,
    settings: RewardSettings,
    mismatch: float | None = None,
    per_entropy: float | None = None,
) -> tuple[RewardState, tuple[Event, ...]]:
    """Return the state after ``step`` and the events at it.

    ``mismatch`` is k3 of the step, for the evidence, ``per_entropy`` k3 / entropy. A value that is None or not finite
    is not measured.
    """
    reward, mismatch, per_entropy = (
        None if each is None or not math.isfinite(each) else each for each in (reward, mismatch, per_entropy)
    )
    average = _moving(state.average_per_entropy, per_entropy, settings)
    state = replace(state, average_per_entropy=average)
    if reward is None:
        return state, ()
    keep = settings.kept_values
    values = (*state.values, reward)[-keep:]
    level = median(values[-TRAILING_VALUES:])
    state = replace(
        state,
        steps=(*state.steps, step)[-keep:],
        values=values,
        mismatch=(*state.mismatch, mismatch)[-keep:],
        best=level if state.best is None else max(state.best, level),
        first=(*state.first, reward) if len(state.first) < settings.start_values else state.first,
    )
    # A fall does not move the floor that it is judged by: a still lower reward would end a collapse.
    if state.lowest is None or state.lowest_level is None:
        state = replace(state, lowest=reward, lowest_level=level)
    elif not state.held and not state.is_low:
        state = replace(state, lowest=min(state.lowest, reward), lowest_level=min(state.lowest_level, level))
    state = _with_block(state, step, reward, mismatch, settings)
    levels = _levels(state, level, settings)
    is_below = levels.reach > 0.0 and level < levels.after(settings.collapse)
    state = replace(state, held=min(state.held + 1, keep) if is_below else 0)
    state = _averaged(state, levels, reward, settings)
    state, collapsed = _advance_collapse(state, step, levels, settings)
    state, fallen = _advance_fall(state, step, levels, settings)
    return state, fallen + collapsed


@dataclass(frozen=True, slots=True)
class _Levels:
    """The present level of the reward, its best, and best − floor; `has_floor`: how far it can fall is known."""

    now: float
    best: float
    reach: float
    has_floor: bool

    @property
    def floor(self) -> float:
        return self.best - self.reach

    def after(self, fall: float) -> float:
        """Return the reward after a fall from the best, a fraction of the way to the floor."""
        return self.best - fall * self.reach


def _levels(state: RewardState, now: float, settings: RewardSettings) -> _Levels:
    assert state.best is not None
    assert state.lowest is not None
    assert state.lowest_level is not None
    floor = settings.floor
    if floor is None and state.lowest >= -1.0:
        floor = floor_of(state.lowest)
    if floor is not None:
        return _Levels(now, state.best, state.best - floor, has_floor=True)
    return _Levels(now, state.best, max(abs(state.best), state.best - state.lowest_level), has_floor=False)


@dataclass(frozen=True, slots=True)
class _Window:
    """Values in which a fall is looked for, each with its step and k3: rewards, or means of blocks."""

    steps: Sequence[int]
    values: Sequence[float]
    mismatch: Sequence[float | None]

    @classmethod
    def of_rewards(cls, state: RewardState) -> _Window:
        return cls(state.steps, state.values, state.mismatch)

    @classmethod
    def of_blocks(cls, state: RewardState) -> _Window:
        blocks = state.blocks
        return cls(
            [each.step for each in blocks],
            [each.total / each.rewards for each in blocks],
            [each.k3 / each.measured if each.measured else None for each in blocks],
        )


def _with_block(
    state: RewardState, step: int, reward: float, mismatch: float | None, settings: RewardSettings
) -> RewardState:
    """Return the state with the reward in its last block; if there are too many blocks, each two become one."""
    blocks, of_block = state.blocks, state.of_block
    if not blocks or _completes_block(state):
        if len(blocks) == settings.blocks:
            blocks, of_block = tuple(map(Block.with_next, blocks[::2], blocks[1::2])), 2 * of_block
        blocks = (*blocks, Block(step))
    measured = (0, 0.0) if mismatch is None else (1, mismatch)
    last = blocks[-1].with_next(Block(step, 1, reward, *measured))
    return replace(state, blocks=(*blocks[:-1], last), of_block=of_block)


def _completes_block(state: RewardState) -> bool:
    return bool(state.blocks) and state.blocks[-1].rewards == state.of_block


@dataclass(frozen=True, slots=True)
class Fall:
    """A fall: the place of its first value in its window, the level before it and now, its deviations."""

    window: _Window
    onset: int
    before: float
    now: float
    z: float


def _advance_collapse(
    state: RewardState, step: int, levels: _Levels, settings: RewardSettings
) -> tuple[RewardState, tuple[Event, ...]]:
    if state.collapse_step is not None:
        back = state.collapse_back + 1 if levels.now >= levels.after(settings.clearing_collapse) else 0
        if back < settings.clearing_values:
            return replace(state, collapse_back=back), ()
        event = replace(
            _event(state, None, "collapse", levels, settings), change="cleared", fired_step=state.collapse_step
        )
        recoveries = min(state.recoveries + 1, settings.most_recoveries)
        return replace(state, collapse_back=0, collapse_step=None, held=0, recoveries=recoveries), (event,)
    fall = None
    if state.recoveries < settings.most_recoveries:
        fall = _sharp_fall(_Window.of_rewards(state), levels, settings.collapse, settings)
    if fall is None:
        fall = _held_fall(state, levels, settings)
    if fall is None:
        return state, ()
    return replace(state, collapse_step=step), (_event(state, fall, "collapse", levels, settings),)


def _advance_fall(
    state: RewardState, step: int, levels: _Levels, settings: RewardSettings
) -> tuple[RewardState, tuple[Event, ...]]:
    if state.slow_before is not None:
        if not _completes_block(state):
            return state, ()
        before = state.slow_before
        levels = replace(levels, now=_Window.of_blocks(state).values[-1], best=before, reach=before - levels.floor)
    if state.fall_step is not None:
        back = state.fall_back + 1 if levels.now >= levels.after(settings.clearing_fall) else 0
        if back < settings.clearing_values:
            return replace(state, fall_back=back), ()
        event = _event(state, None, "fall", levels, settings)
        event = replace(event, change="cleared", fired_step=state.fall_step)
        return replace(state, fall_back=0, fall_step=None, slow_before=None), (event,)
    if state.collapse_step is not None:
        return state, ()
    window = _Window.of_rewards(state)
    fall = _sharp_fall(window, levels, settings.fall, settings) or _average_fall(window, state, settings)
    if fall is not None:
        return replace(state, fall_step=step), (_event(state, fall, "fall", levels, settings),)
    fall = _slow_fall(state, levels, settings)
    if fall is None:
        return state, ()
    event = _event(state, fall, "fall", levels, settings)
    return replace(state, fall_step=step, slow_before=fall.before), (event,)


def _long_levels(state: RewardState, settings: RewardSettings) -> list[float]:
    """Return the means of some blocks in a row, oldest first; empty while blocks are short."""
    if state.of_block < settings.least_of_block:
        return []
    values, width = _Window.of_blocks(state).values, settings.level_blocks
    return [sum(values[place : place + width]) / width for place in range(len(values) - width + 1)]


def _slow_fall(state: RewardState, levels: _Levels, settings: RewardSettings) -> Fall | None:
    """Return a fall of the means of blocks, which is too slow for the kept rewards to show it."""
    means = _long_levels(state, settings) if _completes_block(state) else []
    if not means:
        return None
    floor, width = levels.floor, settings.level_blocks
    best, now = max(range(len(means)), key=means.__getitem__), means[-1]
    if best > len(means) - 1 - width or means[best] - now < settings.fall * (means[best] - floor):
        return None
    window = _Window.of_blocks(state)
    onset, before = bend_of(window.values[best:], width)
    swing = swing_about_peak(window.values, best + width // 2)
    fallen, error = before - now, swing * math.sqrt(2.0 / width)
    if fallen < settings.slow_z * swing or fallen - settings.allowance * error < settings.fall * (before - floor):
        return None
    return Fall(window, best + onset, before, now, fallen / error if error > 0.0 else math.inf)


def _sharp_fall(window: _Window, levels: _Levels, fraction: float, settings: RewardSettings) -> Fall | None:
    """Return a fall by ``fraction`` that is beyond the noise, whatever its shape; None without one."""
    values = window.values
    threshold = levels.after(fraction)
    if len(values) < settings.least_before + settings.least_after or min(values[-2:]) >= threshold:
        return None
    best = _best_shape(values, settings)
    if best is None:
        return None
    onset, before, slope = best
    after = values[onset:]
    noise = _noise_before(values, onset, settings)
    if levels.reach < settings.least_reach * noise.of_neighbours:
        return None
    mean = sum(after) / len(after)
    if slope is None:
        if len(after) < settings.least_after:
            return None
        now = mean
        bound = now + settings.allowance * noise.deviation_of_mean(len(after))
    else:
        newest = after[-4:]
        # The line alone would go on falling after a ramp has ended.
        now = max(before + slope * len(after), sum(newest) / len(newest) + slope * (len(newest) - 1) / 2)
        bound = now + settings.ahead * slope + settings.allowance * noise.deviation_of_mean(len(newest))
    floor = levels.floor
    if bound >= min(threshold, before - fraction * (before - floor)):
        return None
    z = _deviations(before - mean, noise, len(after), min(onset, settings.before_values))
    if slope is None and onset == settings.least_before:
        # The first of the low rewards may be one of those that gave the level.
        while onset > 1 and abs(values[onset - 1] - now) < 0.5 * (before - now):
            onset -= 1
    needed = settings.z if levels.has_floor else settings.z_without_floor
    return Fall(window, onset, before, now, z) if z >= needed else None


def _moving(average: float | None, value: float | None, settings: RewardSettings) -> float | None:
    if average is None or value is None:
        return average if value is None else value
    return average + settings.average_weight * (value - average)


def _averaged(state: RewardState, levels: _Levels, reward: float, settings: RewardSettings) -> RewardState:
    """Return the state with the moving averages after a reward, and for how many steps they have been too low."""
    average, best = _moving(state.average, reward, settings), state.best_average
    assert average is not None
    if len(state.values) > settings.average_start:
        best = average if best is None else max(best, average)
    is_low = False
    if best is not None and len(state.values) > settings.start_values and levels.now < levels.after(settings.fall):
        fallen = (best - average) / levels.reach if levels.reach > 0.0 else 0.0
        error = step_noise(state.values) * math.sqrt(settings.average_weight / (2.0 - settings.average_weight))
        z = (best - average) / error if error > 0.0 else math.inf
        is_mismatched = (state.average_per_entropy or 0.0) >= settings.per_entropy
        is_low = (is_mismatched and fallen >= settings.fall and z >= settings.average_z) or (
            fallen >= settings.average_fall_alone and z >= settings.average_z_alone
        )
    held = state.average_held + 1 if is_low else 0
    return replace(state, average=average, best_average=best, average_held=min(held, settings.average_held))


def _average_fall(window: _Window, state: RewardState, settings: RewardSettings) -> Fall | None:
    """Return the fall of the moving average if it has held; its onset is that of the shape that explains most."""
    if state.average_held < settings.average_held:
        return None
    best = _best_shape(window.values, settings)
    if best is None:
        return None
    onset, before, _ = best
    after = window.values[onset:]
    now = sum(after[-TRAILING_VALUES:]) / len(after[-TRAILING_VALUES:])
    noise = _noise_before(window.values, onset, settings)
    z = _deviations(before - now, noise, len(after), min(onset, settings.before_values))
    return Fall(window, onset, before, now, z)


def _best_shape(values: Sequence[float], settings: RewardSettings) -> tuple[int, float, float | None] | None:
    """Return onset, level before and slope (None: sudden) of the fall that explains most; None if nothing falls.

    Explained is the sum of squares about the level before, corrected for the error of that level.
    """
    count = len(values)
    sums, weighted = [0.0], [0.0]
    for place, value in enumerate(values):
        sums.append(sums[-1] + value)
        weighted.append(weighted[-1] + place * value)
    best: tuple[float, int, float, float | None] | None = None
    for onset in range(settings.least_before, count):
        width = min(onset, settings.before_values)
        before = (sums[onset] - sums[onset - width]) / width
        after = count - onset
        fallen = before - (sums[count] - sums[onset]) / after
        if fallen <= 0.0:
            continue
        explained = after * fallen**2 / (1.0 + after / width)
        if best is None or explained > best[0]:
            best = (explained, onset, before, None)
        if after >= settings.least_after:
            # A line from the last value before the onset down: x = 1 … after.
            squares = after * (after + 1) * (2 * after + 1) / 6.0
            total = after * (after + 1) / 2.0
            products = weighted[count] - weighted[onset] - (onset - 1) * (sums[count] - sums[onset]) - before * total
            explained = products**2 / squares / (1.0 + total**2 / squares / width)
            if explained > best[0]:
                best = (explained, onset, before, products / squares)
    return None if best is None else best[1:]


def _held_fall(state: RewardState, levels: _Levels, settings: RewardSettings) -> Fall | None:
    """Return the fall if the definition of a collapse has held long enough, and noise alone does not explain it."""
    if state.held < HELD_OBSERVATIONS or not levels.has_floor:
        return None
    values = state.values
    # A median of five falls below the threshold two values after the reward does.
    onset = max(len(values) - state.held - TRAILING_VALUES // 2, 1)
    earlier, after = values[max(onset - settings.before_values, 0) : onset], values[onset:]
    noise = _noise_before(values, onset, settings)
    if levels.reach < settings.least_reach * noise.of_neighbours:
        return None
    before, now = sum(earlier) / len(earlier), sum(after) / len(after)
    if long := _long_levels(state, settings):
        # The best of many medians of five is high by chance: rewards of 10 % with few rollouts collapsed 2.2 times in
        # 1,000 steps by the definition alone.
        best = replace(levels, best=max(long), reach=max(long) - levels.floor)
        is_noise = best.reach < settings.least_reach * noise.of_neighbours
        if is_noise or now > best.after(settings.clearing_collapse):
            return None
    z = _deviations(before - now, noise, len(after), len(earlier))
    is_first = not state.recoveries and now <= median(state.first)
    least = settings.z_of_definition if is_first else settings.z_above_start
    return Fall(_Window.of_rewards(state), onset, before, now, z) if z >= least else None


def _noise_before(values: Sequence[float], onset: int, settings: RewardSettings) -> Noise:
    return neighbour_noise(values[:onset] if onset >= settings.noise_values else values)


def _deviations(fallen: float, noise: Noise, after: int, before: int) -> float:
    error = math.hypot(noise.deviation_of_mean(after), noise.deviation_of_mean(before))
    return fallen / error if error > 0.0 else math.copysign(math.inf, fallen)


def is_rising(state: RewardState, settings: RewardSettings) -> bool:
    """Return whether the newest rewards are above those of some steps before, beyond their step-to-step noise."""
    values = state.values[-settings.rise_values - settings.start_values :]
    if state.is_low or len(values) < settings.rise_values + TRAILING_VALUES:
        return False
    before, newest = values[: settings.start_values], values[-TRAILING_VALUES:]
    # From successive differences: residuals of a line would count the rise itself as noise.
    noise = MEDIAN_TO_MEAN * step_noise(values)
    error = noise * math.sqrt(1.0 / len(before) + 1.0 / len(newest))
    return median(newest) - median(before) > settings.rise_z * error


_FALLING = (
    "Compare the reward by task, since harder tasks lower it too, and the length, the entropy and the mismatch of the "
    "same steps. If the tasks are the same, lower the learning rate or go back to a checkpoint from before the fall."
)
_WHERE_TO_LOOK: Mapping[object, str] = {
    "mismatch": "The mismatch rose first: look at the engine and at stale weights.",
    "reward": "The mismatch rose later: look at the learning rate and the data.",
    "no rise": "The mismatch had not risen: look at the learning rate and the data.",
    "healthy": "The mismatch was healthy then: look at the learning rate and the data.",
}
"""Advice after a collapse, by ``first`` of `mismatch_at_fall`."""


def where_to_look(evidence: Mapping[str, Any]) -> str:
    """Return where to look for the reason of a collapse, from its evidence."""
    return _WHERE_TO_LOOK.get(evidence.get("first", ""), "Look at the learning rate, the data and the mismatch.")


def level_after_fall(evidence: Mapping[str, Any], newest: float) -> tuple[float, bool]:
    """Return the level that a fall led to, and whether the reward recovers.

    It is the `newest` reward, and that at which the fall was found if more than a little of it is recovered or no
    newest one is known (NaN).
    """
    before, found = float(evidence["before"]), float(evidence.get("now", newest))
    is_recovering = newest - found > LITTLE_RECOVERY * (before - found)
    return (found if is_recovering or math.isnan(newest) else newest), is_recovering


def _event(
    state: RewardState, fall: Fall | None, kind: Literal["fall", "collapse"], levels: _Levels, settings: RewardSettings
) -> Event:
    """Return the event of a fall, or that of a recovered reward if ``fall`` is None."""
    is_collapse = kind == "collapse"
    best = levels.best
    floor = levels.floor
    now = levels.now
    before = best
    if fall is not None:
        # The level is that of a fitted step, which may lie beyond every reward that was seen.
        values = fall.window.values
        now = max(fall.now, min(values[fall.onset :], default=fall.now))
        # A rising run is already above its mean over the values before the onset, a falling one below it.
        before = max(fall.before, median(values[max(fall.onset - TRAILING_VALUES, 0) : fall.onset]))
    share_fallen = (best - now) / levels.reach if levels.reach > 0.0 else 0.0
    evidence: dict[str, float | int | str] = {
        "key": "rollout:reward_mean",
        "cause": "reward",
        "source": "the definition of a collapse" if is_collapse else "half of the fall that is a collapse",
        "best": best,
        "floor": floor,
        "fall": share_fallen,
        "before": before,
        "now": now,
    }
    if fall is not None:
        evidence["onset_step"] = fall.window.steps[fall.onset]
        if math.isfinite(fall.z):
            evidence["deviations"] = fall.z
        evidence |= mismatch_at_fall(fall.window.steps, fall.window.mismatch, fall.onset, settings.healthy_k3)
    order, mismatch = order_in_words(evidence), mismatch_in_words(evidence)
    headline = f"The reward fell from {reward_number(before)} to {reward_number(now)} by step {state.steps[-1]}"
    headline += order and f"; {order}"
    fraction = settings.collapse if is_collapse else settings.fall
    # A ramp is found `ahead` of the threshold.
    whole = f"the way from its best level, {reward_number(best)}, to the floor, {reward_number(floor)},"
    whole = whole if floor else f"its best level, {reward_number(best)},"
    lost = f"more than {'half' if is_collapse else 'a quarter'} of {whole}"
    is_past = f"By then {lost} was lost." if share_fallen > fraction else f"If it goes on, {lost} is lost in two steps."
    what_to_do = _FALLING
    if is_collapse:
        begun = [int(evidence[name]) for name in ("onset_step", "k3_onset_step") if name in evidence]
        onset = f"step {min(begun)}" if fall is not None else "the fall"
        what_to_do = f"Stop, or go back to a checkpoint from before {onset}. {where_to_look(evidence)}"
    return Event(
        rule=COLLAPSE_RULE if is_collapse else FALL_RULE,
        step=state.steps[-1],
        value=now,
        threshold=levels.after(fraction),
        severity="critical" if is_collapse else "warning",
        why=f"{headline}. {is_past}{mismatch and ' '}{mismatch}",
        what_to_do=what_to_do,
        evidence=evidence,
    )
