"""Differences in words: of a step from the one before, and of two runs over their steps."""

from collections.abc import Mapping, Sequence
from statistics import median

from foreshock.diagnosis.statistics import step_noise

_WINDOW = 5
"""Neighbouring steps whose median decides; so many common steps are needed."""
_DEVIATIONS = 3.0


def apart_since(first: Mapping[int, float], second: Mapping[int, float]) -> int | None:
    """Return the step since which two curves, given by step, stay on different sides of the noise; None: they do not.

    The noise is that of their difference from one common step to the next. Curves that are equal up to a step, such as
    those of a run that was repeated bit for bit, are apart since the first step that differs.
    """
    steps = sorted(first.keys() & second.keys())
    d = [first[step] - second[step] for step in steps]
    if len(d) < _WINDOW:
        return None
    noise = _DEVIATIONS * step_noise(d)
    middles = [median(d[at : at + _WINDOW]) for at in range(len(d) - _WINDOW + 1)]
    side = 1.0 if middles[-1] > 0 else -1.0
    begin = len(middles)
    while begin and side * middles[begin - 1] > noise:
        begin -= 1
    return next((step for step, each in zip(steps[begin:], d[begin:], strict=True) if side * each > noise), None)


def apart_in_words(name: str, since: int | None, first_common: int) -> str:
    """Return since when a quantity of a run differs from that of the run that it is compared with."""
    if since is None:
        return f"{name}: not apart"
    return f"{name}: apart since step {since}{', the first in common' if since == first_common else ''}"


def new_worst_in_words(before: Sequence[int], now: Sequence[int], names: Mapping[int, str]) -> str:
    """Return which token ids are new among those with the largest share of k3; `names`: their texts, if known."""
    new = [each for each in now if each not in before]
    if not new:
        return f"Worst tokens: the same {len(now)} token ids have the largest share of k3."
    named = [f"{each}{f' “{names[each]}”' if each in names else ''}" for each in new]
    return f"Worst tokens: new among the {len(now)} token ids with the largest share of k3: {', '.join(named)}."
