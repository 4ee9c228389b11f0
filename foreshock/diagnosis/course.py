"""Causes seen in k3 over the steps: a jump in one step, growth from the first step on, no change since then, or a start
after healthy steps.

At a run's first step engine and trainer hold the same weights. So stale weights do not explain a mismatch that is
present from the start. One that starts at the floor and grows with every update looks like weights that do not reach
the engine.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.statistics import MAD_TO_SIGMA
from foreshock.diagnosis.wording import number
from foreshock.healthy_ranges import LARGEST_OF_NUMERICS

__all__ = ["FIRST_STEP", "FIRST_STEPS", "causes_of_course", "grows_from_start"]

FIRST_STEP = 1
"""The largest number that a run's first step may have."""

FIRST_STEPS = 16
"""Number of measured steps, from the run's first one on, that show whether k3 grew from the start."""

# Least factor of a jump, least steps on either side, least deviations of one step. A k3 below the last is ignored.
_LEAST_JUMP, _LEAST_SIDE, _DEVIATIONS, _LEAST_K3 = 1.5, 5, 6.0, 1e-4
# Least deviations of the change at a jump among all changes, and of the difference of two levels of independent values.
_CHANGE_DEVIATIONS, _LEVEL_DEVIATIONS, _INDEPENDENT = 7.0, 10.0, 0.75
# The values on either side may drift by at most this fraction of the jump.
_MOST_DRIFT = 0.35
_LEAST_STEPS = 4
# Healthy steps before a mismatch that began, and the least multiple of their largest k3 in each step since.
_LEAST_HEALTHY, _TIMES_OF_HEALTHY = 2, 5.0
# Flat values, then growing ones, of an engine that stopped to get weights; the power of the growth, and the part of the
# squares that an exponential leaves.
_LEAST_FLAT, _LEAST_GROWING, _LEAST_POWER, _MOST_POWER, _BETTER = 8, 10, 0.7, 2.6, 0.5
# Least power of the second half, as a part of that of all: a mismatch that fed itself is nearly level then.
_STILL_POWER = 0.7
# A run's first step alone is enough if all later ones are so many times its k3.
_TIMES_OF_FIRST = 20.0
# Growth still counts while the median of the newest 5 values is at least half of the level that k3 grew to.
_STILL_THERE, _NEWEST = 0.5, 5
_HEALTHY_START, _GROWTH = 1e-3, 8.0
# Growth with noise: from so many values on, none is below this part of the largest before it, and the last third is
# this multiple of the third before, as a lag of few steps makes no longer.
_LEAST_NOISY, _LEAST_OF_LARGEST, _STILL_GROWS = 12, 0.6, 1.4
# Of many values the outer tenths may be noise; of few, heavy tails alone spread k3 of one mismatch over a factor of 2.
_MANY, _OUTER = 16, 0.1
_STATIC_OF_MANY, _STATIC_OF_FEW = 1.6, 2.5
# Dropout of 0.1 makes 0.3 and more, quantised weights 1e-2 and more.
_LARGEST_OF_PRECISION = 1e-2
# Other known causes already explain a k3 that is present since the first step.
_OPEN = ("mismatch_everywhere", "k3_per_entropy")
# Each quarter of the steps is so many times the one before it.
_QUARTER_GROWS = 1.3
# Two temperatures are there from the first step on: they explain no growth. Nor does a place.
_NO_GROWTH = frozenset({"temperatures_differ", "mismatch_by_place"})


def causes_of_course(
    steps: Sequence[int],
    k3: Sequence[float],
    named: Collection[str],
    healthy_end: float = _HEALTHY_START,
    quantity: str = "k3",
    first: Mapping[int, float] | None = None,
    *,
    is_frozen: bool = False,
) -> tuple[DiagnosisCause, ...]:
    """Return the causes seen in k3 at ascending steps; `named` are the causes already known from elsewhere.

    A k3 up to `healthy_end` needs no cause; `quantity` is the name of the values in sentences. `first` has the values
    of the run's first steps, if they are before `steps`. `is_frozen`: the learning rate has been 0 since the start.
    """
    at, logs = _known(zip(steps, k3, strict=True))
    if len(at) < _LEAST_STEPS:
        return ()
    jump, other = _jump(at, logs, quantity), None
    explained = set(named).difference(_OPEN)
    if explained <= _NO_GROWTH:
        other = _since_start(*_known((first or {}).items()), at, logs, healthy_end, quantity, is_frozen)
    if explained and other is not None and other.name == "static_mismatch":
        other = None
    if explained <= _NO_GROWTH and other is None and jump is None:
        other = _stopped(at, np.exp(logs), healthy_end, quantity)
    if not explained and other is None and jump is None:
        other = _began(at, np.exp(logs), healthy_end, quantity)
    return tuple(each for each in (jump, other) if each is not None)


def _known(values: Iterable[tuple[int, float]]) -> tuple[list[int], NDArray[np.float64]]:
    """Return the steps and the logs of the positive finite values."""
    known = [(step, value) for step, value in values if value > 0 and math.isfinite(value)]
    return [step for step, _ in known], np.log([value for _, value in known])


def _jump(steps: Sequence[int], logs: NDArray[np.float64], quantity: str) -> DiagnosisCause | None:
    """Return a jump of k3 from one level to another between two neighbouring steps."""
    if logs.max() < math.log(_LEAST_K3) or np.ptp(logs) < math.log(_LEAST_JUMP):
        # No level is high enough, or no two are far enough apart: most steps of healthy runs return here.
        return None
    best: tuple[float, int] | None = None
    values: list[float] = logs.tolist()
    for split in range(_LEAST_SIDE, len(values) - _LEAST_SIDE + 1):
        before, after, scatter = _levels(values, split)
        clear = abs(after - before) - scatter
        if best is None or clear > best[0]:
            best = clear, split
    if best is None:
        return None
    split = best[1]
    before, after, scatter = _levels(values, split)
    size = after - before
    # From differences of neighbours, so that drift is not noise; the difference at the jump is left out.
    noise = MAD_TO_SIGMA * float(np.median(np.abs(np.delete(np.diff(logs), split - 1)))) / math.sqrt(2.0)
    large = abs(size) >= max(math.log(_LEAST_JUMP), _DEVIATIONS * noise, 2.5 * scatter)
    if not large or max(math.exp(before), math.exp(after)) < _LEAST_K3:
        return None
    if not _is_step(logs, split, before, after):
        return None
    if any(abs(_drift(side)) > _MOST_DRIFT * abs(size) for side in (logs[:split], logs[split:])):
        return None
    # The last value before the jump and the first one after it must be at the level of their side.
    if abs(logs[split - 1] - before) > 0.4 * abs(size) or abs(logs[split] - after) > 0.4 * abs(size):
        return None
    last, step, times = steps[split - 1], steps[split], math.exp(abs(size))
    when = f"at step {step}" if step == last + 1 else f"between steps {last} and {step}"
    sentence = (
        f"{quantity} {'rose' if size > 0 else 'fell'} from {number(math.exp(before))} to {number(math.exp(after))} "
        f"({'×' if size > 0 else '÷'} {number(times)}) in one step, {when}, "
        f"{_since_jump(logs[:split], logs[split:])}."
    )
    return DiagnosisCause(
        name="mismatch_jump",
        sentence=sentence,
        source="detector",
        title=f"{quantity} {'rose' if size > 0 else 'fell'} {'×' if size > 0 else '÷'} {number(times)} {when}",
        what_to_do=f"Look at what changed {when}: code, configuration, precision, hardware, a restart.",
        evidence={"step": step, "before": math.exp(before), "after": math.exp(after)},
    )


def _began(steps: Sequence[int], k3: NDArray[np.float64], healthy_end: float, quantity: str) -> DiagnosisCause | None:
    """Return the cause if k3 was healthy in the first steps and is far above that in each step since, level or not."""
    above = np.flatnonzero(k3 > healthy_end)
    place = int(above[0]) if above.size else 0
    before, after = k3[:place], k3[place:]
    if not before.size or after.size < _LEAST_STEPS or after.min() < _TIMES_OF_HEALTHY * before.max():
        return None
    if before.size < _LEAST_HEALTHY and (steps[0] > FIRST_STEP or after.min() < _TIMES_OF_FIRST * before.max()):
        return None
    step = steps[place]
    sentence = (
        f"{quantity} was healthy up to step {steps[place - 1]} ({_range(before)}) and "
        f"is {number(after.min())} to {number(after.max())} since step {step}. What is there from the first step on, "
        "such as the precision of one side or dropout in the scoring pass, does not make this."
    )
    first_sync = "the first update and its weight sync, " if before.size < _LEAST_HEALTHY else ""
    advice = (
        f"Look at what happened at step {step}: {first_sync}a weight sync that failed, a resume, a restart, another "
        "setting. `foreshock doctor` with the weights of this step and of earlier ones names old weights."
    )
    title = f"weights of another step, or a change at step {step}"
    return _possible(
        "mismatch_began", title, sentence, advice, {"step": step, "before": before.max(), "after": after.min()}
    )


def _stopped(steps: Sequence[int], k3: NDArray[np.float64], healthy_end: float, quantity: str) -> DiagnosisCause | None:
    """Return the cause if k3 was flat and healthy, and from one step on grows as the distance of weights does.

    The distance from weights that stay grows as a power of the number of updates, between 1 (a random walk) and 2 (one
    direction). A mismatch that feeds itself grows exponentially.
    """
    if k3.size < _LEAST_FLAT + _LEAST_GROWING:
        return None
    level = float(np.median(k3[:_LEAST_FLAT]))
    place = int(np.flatnonzero(k3 <= 2.0 * level)[-1]) + 1
    flat, grown = k3[:place], k3[place:]
    is_flat = level <= healthy_end and float(np.mean(flat > 2.0 * level)) <= _OUTER
    is_grown = grown.size >= _LEAST_GROWING and grown[-1] >= _GROWTH * max(level, healthy_end)
    if not is_flat or place < _LEAST_FLAT or not is_grown:
        return None
    logs, updates = np.log(grown - level), np.arange(1, grown.size + 1)
    (power, _), rest, *_ = np.polyfit(np.log(updates), logs, 1, full=True)
    _, of_exponential, *_ = np.polyfit(updates, logs, 1, full=True)
    half = grown.size // 2
    still = np.polyfit(np.log(updates[half:]), logs[half:], 1)[0]
    if (
        still < _STILL_POWER * power
        or not _LEAST_POWER <= power <= _MOST_POWER
        or rest[0] > _BETTER * of_exponential[0]
    ):
        return None
    step = steps[place]
    sentence = (
        f"{quantity} was about {number(level)} up to step {steps[place - 1]} and has grown to {number(grown[-1])} "
        f"since, as the {power:.1f}th power of the number of steps: it looks as if the engine kept the weights of "
        f"about step {steps[place - 1]}."
    )
    advice = (
        "Check that updates still reach the engine: compare digests of its weights, and look at what happened about "
        f"step {step}. `foreshock doctor` with the weights of step {steps[place - 1]} proves it."
    )
    title = f"no new weights in the engine since about step {step}"
    return _possible("weights_not_delivered", title, sentence, advice, {"step": step, "level": level, "power": power})


def _range(values: NDArray[np.float64]) -> str:
    low, high = number(values.min()), number(values.max())
    return low if low == high else f"{low} to {high}"


def _since_jump(before: NDArray[np.float64], after: NDArray[np.float64]) -> str:
    """Return a clause on drift: after a jump, k3 of stale weights keeps rising and that of numerics does not."""
    drift = _drift(after)
    if abs(drift) >= math.log(_LEAST_JUMP):
        newest = math.exp(float(np.median(after[-max(1, after.size // 3) :])))
        return f"and has {'risen' if drift > 0 else 'fallen'} since, to {number(newest)}"
    return "after a drift" if abs(_drift(before)) >= math.log(_LEAST_JUMP) else "with no drift before or after"


def _levels(values: list[float], split: int) -> tuple[float, float, float]:
    """Return the medians before and from `split` on, and the mean distance of the values from the median of their
    side."""
    before, after = median(values[:split]), median(values[split:])
    distance = sum(abs(value - before) for value in values[:split]) + sum(
        abs(value - after) for value in values[split:]
    )
    return before, after, distance / len(values)


def _is_step(logs: NDArray[np.float64], split: int, before: float, after: float) -> bool:
    """Return whether the two levels are more than k3 that wanders.

    Values of a healthy run are not independent: a level that wanders slowly looks like two levels. Either the change
    from one value to the next is far larger than all such changes, or neighbours on each side are nearly independent,
    so that the levels are known well.
    """
    changes = np.diff(logs)
    others = np.delete(changes, split - 1)
    if abs(changes[split - 1]) >= _CHANGE_DEVIATIONS * MAD_TO_SIGMA * float(np.median(np.abs(others))):
        return True
    rest = np.concatenate([logs[:split] - before, logs[split:] - after])
    square = float(np.square(rest).mean())
    # 1 if neighbours are independent, near 0 if they wander (von Neumann's ratio).
    independence = float(np.square(others).mean()) / (2.0 * square) if square else 1.0
    error = math.sqrt(square * (1.0 / split + 1.0 / (rest.size - split)))
    return independence >= _INDEPENDENT and abs(after - before) >= _LEVEL_DEVIATIONS * error


def _drift(side: NDArray[np.float64]) -> float:
    """Return how far a side drifts from its first to its last third."""
    third = max(1, side.size // 3)
    return float(np.median(side[-third:]) - np.median(side[:third]))


def _since_start(
    first_steps: Sequence[int],
    first_logs: NDArray[np.float64],
    newest_steps: Sequence[int],
    newest_logs: NDArray[np.float64],
    healthy_end: float,
    quantity: str,
    is_frozen: bool,
) -> DiagnosisCause | None:
    """Return the cause if k3 is constant or grew since the first step; None otherwise or if that step is unknown."""
    steps = [*first_steps, *newest_steps]
    if steps[0] > FIRST_STEP:
        return None
    values = np.exp(np.concatenate([first_logs, newest_logs]))
    first, which = float(values[0]), f"all steps from {steps[0]} to {steps[-1]}"
    if first_steps:
        which = f"the steps {steps[0]} to {first_steps[-1]} and {newest_steps[0]} to {steps[-1]}"
    low, high = np.quantile(values, (_OUTER, 1.0 - _OUTER)) if values.size >= _MANY else (values.min(), values.max())
    # The first values too: growth that ended early is no constant level.
    typical = float(np.median(values))
    spread = float(max(high / low, typical / first, first / typical))
    evidence = {"first": first, "least": float(values.min()), "largest": float(values.max())}
    most = _STATIC_OF_MANY if values.size >= _MANY else _STATIC_OF_FEW
    if spread <= most and typical > healthy_end:
        sentence = (
            f"{quantity} is about the same in {which} ({number(values.min())} to {number(values.max())}): it was there "
            "before the first update and does not grow with the updates, so it is not stale weights. "
        )
        if typical <= _LARGEST_OF_PRECISION:
            sentence += "Kernels or the precision of one side can make so much."
            advice = "Compare the precisions: `foreshock doctor` with the step's weights tries those of either side."
        elif typical <= LARGEST_OF_NUMERICS:
            sentence += "A quantised engine can make so much, or little dropout in the scoring pass."
            advice = (
                "Let the trainer score one batch twice: with dropout the two passes differ. Else compare the "
                "precisions: `foreshock doctor` with the step's weights tries quantised weights and caches."
            )
        else:
            sentence += (
                f"It is larger than what quantised weights make (FP8: up to {LARGEST_OF_NUMERICS:g}): one side "
                "computes something else, or scores other tokens or another context."
            )
            advice = (
                "Let the trainer score one batch twice: with dropout the two passes differ. If they are equal, run "
                "`foreshock doctor` with the step's weights: it tries what one side may do differently."
            )
        title = "a difference of one side, not stale weights"
        return _possible("static_mismatch", title, sentence, advice, evidence)
    early = values[: len(first_steps) or FIRST_STEPS]
    reached = _grown_to(early, healthy_end)
    if reached is not None and float(np.median(values[-_NEWEST:])) >= _STILL_THERE * reached:
        last = steps[early.size - 1]
        grew = f"{quantity} was {number(first)} at step {steps[0]} and grew from step to step, to {number(reached)} at "
        if is_frozen:
            sentence = (
                f"{grew}step {last}. The logged learning rate is 0 in all steps, so that neither an update nor old "
                "weights make it: a state ages that no update changes, such as a cache of the engine."
            )
            advice = (
                "Restart the engine with the same weights: if k3 falls back, it is the engine's state. Then turn its "
                "prefix cache off."
            )
            return _possible(
                "mismatch_without_updates", "a state that ages, as the rate is 0", sentence, advice, evidence
            )
        sentence = (
            f"{grew}step {last}. It looks as if the engine, or a part of it (an adapter, the head, a cache), still "
            f"held the weights of step {steps[0]}: updates do not arrive, or only in part or late."
        )
        advice = (
            "Check that updates reach the engine: compare digests of its weights. `foreshock doctor` with the weights "
            f"of this step and of step {steps[0]} names the part that is old."
        )
        title = f"updates since step {steps[0]} do not reach the engine, or only in part or late"
        return _possible("weights_not_delivered", title, sentence, advice, evidence)
    return None


def grows_from_start(steps: Sequence[int], k3: Sequence[float] | NDArray[np.float64]) -> bool:
    """Return whether k3 has grown since the run's first step: each quarter of the steps is clearly above the one before
    it, and the last one far above the first steps."""
    values = np.asarray(k3, np.float64)
    if values.size < _MANY or steps[0] > FIRST_STEP or not np.isfinite(values).all():
        return False
    quarters = [float(np.median(each)) for each in np.array_split(values, 4)]
    rises = all(later >= _QUARTER_GROWS * before for before, later in pairwise(quarters))
    return rises and quarters[-1] >= _GROWTH * float(np.median(values[:_NEWEST]))


def _grown_to(early: NDArray[np.float64], healthy_end: float) -> float | None:
    """Return the level that k3 grew to in its first steps from a healthy start; None if it did not grow steadily."""
    first, last = float(early[0]), float(early[-1])
    if first <= healthy_end and last >= _GROWTH * first and bool((np.diff(early) > 0).all()):
        return last
    third = early.size // 3
    if early.size < _LEAST_NOISY or first > healthy_end:
        return None
    last, before = float(np.median(early[-third:])), float(np.median(early[-2 * third : -third]))
    steady = bool((early >= _LEAST_OF_LARGEST * np.maximum.accumulate(early)).all())
    is_large = last >= max(_GROWTH * first, healthy_end) and last >= _STILL_GROWS * before
    return last if steady and is_large else None


def _possible(name: str, title: str, sentence: str, advice: str, evidence: dict[str, float]) -> DiagnosisCause:
    return DiagnosisCause(
        name=name, title=title, sentence=sentence, source="detector", certainty="possible", what_to_do=advice,
        evidence=evidence,
    )  # fmt: skip
