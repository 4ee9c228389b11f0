"""Single steps whose k3 is far above that of the others: one bad step, or every sixth step of a bad replica.

A mean over ten steps mixes them with healthy steps. So they are left out of the k3 of "now", counted, and named with
their steps, also when they are over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.wording import number

ODD_STEPS: Final = "mismatch_in_steps"
"""The name of the cause."""

_LEAST_STEPS = 4
_TIMES = 10.0
"""Multiple of the lower quartile of k3 from which on a step is odd. k3 that wanders (φ 0.97, standard deviation 0.5 of
its logarithm) stays below 6 times."""

_LONGEST = 5
"""Most odd steps in a row. More are judged by the rules on several steps in a row."""

_LARGEST_SHARE = 0.5
LEAST_GROUPS = 3
"""Separate groups of odd steps from which on they are called recurring."""

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class OddSteps:
    """Steps apart from the others: `groups` are the steps in a row, `of` is the number of steps that were compared.

    `level` is the median k3 of the odd steps, `rest` that of the others, both in nats.
    """

    groups: tuple[tuple[int, ...], ...]
    of: int
    level: float
    rest: float

    @property
    def steps(self) -> frozenset[int]:
        """All odd steps."""
        return frozenset(step for group in self.groups for step in group)

    @property
    def recur(self) -> bool:
        """True if there are enough groups to call the odd steps recurring."""
        return len(self.groups) >= LEAST_GROUPS

    @property
    def every(self) -> int | None:
        """The distance of the odd steps if it is always the same; None otherwise."""
        gaps = {later[0] - earlier[0] for earlier, later in pairwise(self.groups)}
        return gaps.pop() if self.recur and len(gaps) == 1 else None


def odd_steps(steps: Sequence[int], k3: Sequence[float], healthy_end: float) -> OddSteps | None:
    """Return the single steps whose k3 is above `healthy_end` and far above that of the others; None without any.

    The newest steps count only if such steps recur: else it is not known yet whether k3 stays there.
    """
    known = [(step, value) for step, value in zip(steps, k3, strict=True) if math.isfinite(value)]
    if len(known) < _LEAST_STEPS:
        return None
    values = [value for _, value in known]
    threshold = max(healthy_end, _TIMES * sorted(values)[len(values) // 4])
    if max(values) <= threshold:
        return None
    others = [value for value in values if value <= threshold]
    # Between two groups k3 is back, or they are one: k3 that rises slowly is now above the threshold, now below it.
    back = math.sqrt(threshold * max(median(others), 0.0)) if others else 0.0
    groups: list[list[int]] = []
    for place, value in enumerate(values):
        if value > threshold:
            if groups and min(values[groups[-1][-1] + 1 : place], default=math.inf) > back:
                groups[-1].extend(range(groups[-1][-1] + 1, place + 1))
            else:
                groups.append([place])
    ends = [-1, *(group[-1] for group in groups)]
    starts = [*(group[0] for group in groups), len(values)]
    short = [
        group
        for before, group, after in zip(ends, groups, starts[1:], strict=False)
        if len(group) <= _LONGEST and _stand_out(values[before + 1 : group[0]], values[group[-1] + 1 : after], back)
    ]
    if short and short[-1][-1] == len(values) - 1 and len(short) < LEAST_GROUPS:
        short.pop()
    odd = {place for group in short for place in group}
    if not odd or len(odd) > _LARGEST_SHARE * len(values):
        return None
    named = tuple(tuple(known[place][0] for place in group) for group in short)
    return OddSteps(named, len(values), median([values[place] for place in odd]), median(others))


def _stand_out(before: Sequence[float], after: Sequence[float], back: float) -> bool:
    """Return whether k3 is back before and after a group, as far as there are such steps: a ramp is no odd step."""
    return all(not side or min(side) <= back for side in (before, after))


def cause_of(odd: OddSteps, healthy_end: float, quantity: str, resumes: Collection[int] = ()) -> DiagnosisCause:
    """Return the odd steps as a cause; `resumes` are the steps at which attempts resumed."""
    level, rest = number(odd.level), number(odd.rest)
    first = odd.groups[0][0]
    if odd.recur:
        every = "" if odd.every is None else f", every {odd.every} steps"
        title = f"{quantity} is about {level} in {len(odd.steps)} of {odd.of} steps{every}"
        sentence = f"{title}, and {rest} in the others: {_named([step for group in odd.groups for step in group])}."
        advice = (
            f"{'' if odd.every is None else f'Ask what happens every {odd.every} steps: a sync, an evaluation. '}"
            "Compare these steps with the others: which of their rollouts have it, which replica of the engine sampled "
            "them (log `engine_id`), and with which weights."
        )
    else:
        where = " and ".join(_words(group) + _at_resume(group, resumes) for group in odd.groups)
        about = "" if len(odd.steps) == 1 else "about "
        title = f"{quantity} was {about}{level} {where}" + (", healthy since" if odd.rest <= healthy_end else "")
        sentence = f"{title}; it is {rest} in the other {odd.of - len(odd.steps)} measured steps."
        advice = (
            f"Look at what was different {where}: a restart or a resume with other weights, a missed weight sync, "
            "another batch."
        )
    return DiagnosisCause(
        name=ODD_STEPS,
        sentence=sentence,
        source="detector",
        title=title,
        what_to_do=advice,
        evidence={
            "first_step": first,
            "steps": len(odd.steps),
            "of_steps": odd.of,
            "k3": odd.level,
            "k3_elsewhere": odd.rest,
        },
    )


def _words(group: Sequence[int]) -> str:
    return f"at step {group[0]}" if len(group) == 1 else f"in steps {group[0]} to {group[-1]}"


def _at_resume(group: Sequence[int], resumes: Collection[int]) -> str:
    # An attempt that resumes at step n may log n or n + 1 first.
    return ", at the resume" if {group[0], group[0] - 1} & set(resumes) else ""


def _named(steps: Sequence[int]) -> str:
    """Return "steps 6, 12, 18, …, 60"."""
    if len(steps) <= _MOST_NAMED + 1:
        return f"steps {', '.join(map(str, steps))}"
    return f"steps {', '.join(map(str, steps[:_MOST_NAMED]))}, …, {steps[-1]}"
