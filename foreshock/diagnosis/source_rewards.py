"""A fall of the reward by data source: another mix of them, or the fall of one only.

The difference of two mean rewards is Σ (w₁ − w₀)(m₀ + m₁)/2 + Σ (w₀ + w₁)/2 (m₁ − m₀) over the sources, with w their
shares of the rollouts and m their mean rewards: the first sum is that of the mix, the second that of each source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Final

import numpy as np

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import History, PastAlert
from foreshock.diagnosis.wording import percent, reward_number

MIX_CHANGED: Final = "data_sources_changed"
ONE_SOURCE_FELL: Final = "one_data_source_fell"

_LEAST_STEPS: Final = 5
_MOST_STEPS: Final = 20
_MOST_OF_FALL: Final = 0.7
"""Least part of the fall that the mix, or one source, makes."""
_LEAST_MOVED: Final = 0.15
"""Least share of the rollouts that is of other sources than before, for another mix."""
_LEAST_OTHERS: Final = 0.15
"""Least share of the other sources, before and since, of one that fell alone."""
_OTHERS_FELL: Final = 0.2
"""The others fell by at most this part of the fall of one that fell alone."""
LEAST_FALL: Final = 0.1
"""Least fall, as a part of the mean reward before, without an alert."""
_Z: Final = 4.0


@dataclass(frozen=True, slots=True)
class _Side:
    """The steps before or since a fall: share of the rollouts and mean reward of each source; both of each step."""

    shares: dict[str, float]
    means: dict[str, float]
    mean: float
    of_steps: Sequence[dict[str, tuple[int, float]]]

    @classmethod
    def of(cls, of_steps: Sequence[dict[str, tuple[int, float]]]) -> _Side:
        counts, totals = dict[str, int](), dict[str, float]()
        for each in of_steps:
            for name, (count, total) in each.items():
                counts[name] = counts.get(name, 0) + count
                totals[name] = totals.get(name, 0.0) + total
        whole = sum(counts.values())
        means = {name: totals[name] / count for name, count in counts.items()}
        return cls({n: c / whole for n, c in counts.items()}, means, sum(totals.values()) / whole, of_steps)

    def squared_error(self, names: frozenset[str]) -> float:
        """Return the squared standard error of the mean reward of some sources, from its spread over the steps."""
        sums = [[each[name] for name in names if name in each] for each in self.of_steps]
        means = [sum(total for _, total in each) / sum(count for count, _ in each) for each in sums if each]
        return variance(means) / len(means) if len(means) > 1 else math.inf


def sources_in_fall(history: History, fall: PastAlert | None) -> tuple[DiagnosisCause, ...]:
    """Return what a fall of the reward is by data source, as a cause: that of an alert, or one with another mix."""
    steps = sorted(history.sources)
    at = _change_of_mix(history, steps) if fall is None else fall.onset
    earlier = [dict(history.sources[step]) for step in steps if at is not None and step < at][-_MOST_STEPS:]
    later = [dict(history.sources[step]) for step in steps if at is not None and step >= at][-_MOST_STEPS:]
    if at is None or min(len(earlier), len(later)) < _LEAST_STEPS:
        return ()
    before, since = _Side.of(earlier), _Side.of(later)
    every = frozenset(before.shares) | frozenset(since.shares)
    fallen = before.mean - since.mean
    error = math.sqrt(before.squared_error(every) + since.squared_error(every))
    if not fallen > max(_Z * error, 0.0 if fall else LEAST_FALL * abs(before.mean)):
        return ()
    within = dict.fromkeys(every, 0.0)
    for name in before.means.keys() & since.means.keys():
        share = (before.shares[name] + since.shares[name]) / 2.0
        within[name] = share * (before.means[name] - since.means[name])
    if fallen - sum(within.values()) >= _MOST_OF_FALL * fallen:
        return _other_mix(at, before, since)
    worst = max(within, key=within.__getitem__)
    return _one_source(at, worst, before, since) if within[worst] >= _MOST_OF_FALL * fallen else ()


def _change_of_mix(history: History, steps: Sequence[int]) -> int | None:
    """Return the first step of the mix that differs most from the one before it."""
    names = sorted({name for step in steps for name in history.sources[step]})
    if len(steps) < 2 * _LEAST_STEPS or len(names) < 2:
        return None
    counts = np.array([[history.sources[step].get(name, (0, 0.0))[0] for name in names] for step in steps])
    before = counts.cumsum(axis=0)[_LEAST_STEPS - 1 : len(steps) - _LEAST_STEPS]
    since = counts.sum(axis=0) - before
    moved = np.abs(before / before.sum(1, keepdims=True) - since / since.sum(1, keepdims=True)).sum(1)
    places = np.arange(_LEAST_STEPS, len(steps) - _LEAST_STEPS + 1)
    return steps[int(places[np.argmax(moved * np.sqrt(places * (len(steps) - places)))])]


def _moved(before: _Side, since: _Side) -> float:
    """Return the share of the rollouts that is of other sources than before."""
    names = before.shares.keys() | since.shares.keys()
    return sum(abs(before.shares.get(name, 0.0) - since.shares.get(name, 0.0)) for name in names) / 2.0


def _other_mix(at: int, before: _Side, since: _Side) -> tuple[DiagnosisCause, ...]:
    """Return another mix as a cause; the source that is named is the one that grew most."""
    if _moved(before, since) < _LEAST_MOVED:
        return ()
    grown = max(since.shares, key=lambda name: since.shares[name] - before.shares.get(name, 0.0))
    was = percent(before.shares.get(grown, 0.0))
    title = f"{percent(since.shares[grown])} of the rollouts are of {grown} since step {at} ({was} before)"
    levels = ", ".join(
        f"{name} {reward_number(before.means[name])} before and {reward_number(since.means[name])} since"
        for name in sorted(before.means.keys() & since.means.keys())
    )
    kept = f"Of each source it is nearly as before ({levels})." if levels else "No source is in both."
    return (
        _cause(
            MIX_CHANGED,
            title,
            f"{title}: the mean reward fell from {reward_number(before.mean)} to {reward_number(since.mean)} with "
            f"them. {kept}",
            f"Compare the reward by data source across step {at}: the mean over all of them compares other prompts. "
            "Nothing is to be undone if the change is meant.",
            at,
            before.shares.get(grown, 0.0),
            since.shares[grown],
        ),
    )


def _one_source(at: int, name: str, before: _Side, since: _Side) -> tuple[DiagnosisCause, ...]:
    """Return the fall of one source as a cause, if the others stay."""
    fallen = before.means[name] - since.means[name]
    error = math.sqrt(sum(side.squared_error(frozenset({name})) for side in (before, since)))
    others = [_without(name, side) for side in (before, since)]
    if None in others or fallen < _Z * error:
        return ()
    was, now = (each for each in others if each is not None)
    if was - now > _OTHERS_FELL * fallen:
        return ()
    levels = f"from {reward_number(before.means[name])} to {reward_number(since.means[name])}"
    title = f"only the reward of data source {name} fell, {levels}"
    return (
        _cause(
            ONE_SOURCE_FELL,
            title,
            f"{title}, about step {at}; that of the others is {reward_number(now)}, {reward_number(was)} before.",
            f"Read responses of {name} from before and since step {at}, and look at its reward function, its sandbox "
            "or judge, and its prompts: what hits one source only is rarely the policy.",
            at,
            before.means[name],
            since.means[name],
        ),
    )


def _without(name: str, side: _Side) -> float | None:
    """Return the mean reward of the other sources; None if they are too few of the rollouts."""
    rest = 1.0 - side.shares[name]
    return (
        fmean(
            [side.means[each] for each in side.means if each != name],
            [side.shares[each] for each in side.means if each != name],
        )
        if rest >= _LEAST_OTHERS
        else None
    )


def _cause(name: str, title: str, sentence: str, advice: str, at: int, before: float, now: float) -> DiagnosisCause:
    return DiagnosisCause(
        name=name, title=title, sentence=sentence, source="detector", explains=False, what_to_do=advice,
        evidence={"at": at, "before": before, "now": now},
    )  # fmt: skip
