"""Two certificates of one model: which rows became worse or better, paired by prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.certify.certificate import VERDICTS, Certificate, Row, Size
from foreshock.diagnosis.wording import number
from foreshock.errors import ConfigurationError

_LEVEL = 0.05
"""The chance that any row of two equal certificates is named: each interval's is this, divided by the rows."""
_RESAMPLES = 20_000
_MATERIAL = 0.1
"""Share of the floor below which a change does not count: a run cannot tell it from rounding."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A row that differs between two certificates. `change`: worse, better, new or not compared."""

    row: str
    change: str
    sentence: str


def compare(new: Certificate, old: Certificate) -> list[Moved]:
    """Return the rows of `new` that differ from those of `old`. Raises ConfigurationError for another model."""
    check_weights(new.model, new.model_digest, old)
    pairs = [(row, before) for row in new.rows if (before := old.row(row.name)) is not None]
    count = sum(len(_shared(*pair)) for pair in pairs)
    moved = [found for pair in pairs if (found := _moved(*pair, _LEVEL / max(count, 1))) is not None]
    moved += [Moved(row.name, "new", row.sentence) for row in new.rows if old.row(row.name) is None]
    return moved


def check_weights(model: str, digest: str, old: Certificate) -> None:
    """Raise ConfigurationError if a model's weights are not those of a certificate, or if it has no sums by prompt."""
    if digest != old.model_digest:
        raise ConfigurationError(
            f"the certificate to compare with is of other weights: {old.model} ({old.model_digest[7:19]}), not {model} "
            f"({digest[7:19]}); certify one model with both engines"
        )
    sizes = [size for row in old.rows for size in row.sizes]
    if sizes and not any(size.prompts for size in sizes):
        raise ConfigurationError("the certificate to compare with is one of the registry, which has no sums by prompt")


def _moved(row: Row, before: Row, level: float) -> Moved | None:
    if "not tried" in (row.verdict, before.verdict):
        if row.verdict == before.verdict:
            return None
        why = row if row.verdict == "not tried" else before
        return Moved(row.name, "not compared", f"{before.verdict} before, {row.verdict} now: {why.sentence}")
    changes = [
        change
        for size, earlier in _shared(row, before)
        if (change := _change(size, earlier, level, is_same=row.rollouts == before.rollouts)) is not None
    ]
    graver = VERDICTS.index(row.verdict) - VERDICTS.index(before.verdict)
    for kind in ("worse", "better"):
        told = [text for name, text in changes if name == kind]
        if told:
            verdicts = "" if graver == 0 else f"{before.verdict} before, {row.verdict} now: "
            return Moved(row.name, kind, verdicts + "; ".join(told) + ".")
    return None


def _shared(row: Row, before: Row) -> list[tuple[Size, Size]]:
    """Return the sizes of both rows in each precision that both have."""
    earlier = {size.dtype: size for size in before.sizes}
    return [(size, earlier[size.dtype]) for size in row.sizes if size.dtype in earlier]


def _change(size: Size, before: Size, level: float, *, is_same: bool) -> tuple[str, str] | None:
    """Return whether E[d²]/2 became worse or better, with the figures; None if it did neither beyond noise."""
    theirs = {each.name: each for each in before.prompts}
    shared = [(each, theirs[each.name]) for each in size.prompts if each.name in theirs]
    if len(shared) < 2:
        return None
    sums = np.array([[one.half_squares, other.half_squares] for one, other in shared])
    tokens = np.array([[one.tokens, other.tokens] for one, other in shared], np.float64)
    mean = sums.sum(0) / tokens.sum(0)
    low, high = _interval(sums, tokens, level)
    material = _MATERIAL * max(size.floor, before.floor)
    text = f"E[d²]/2 in {size.dtype} was {number(float(mean[1]))} and is {number(float(mean[0]))}" + (
        "" if is_same else " on other tokens of the same prompts"
    )
    if low > 0.0 and mean[0] - mean[1] > material:
        return "worse", text
    if high < 0.0 and mean[1] - mean[0] > material:
        return "better", text
    return None


def _interval(sums: NDArray[np.float64], tokens: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Return the interval of the difference of two ratio means over resampled prompts."""
    number_of = len(sums)
    draws = np.random.default_rng(27).multinomial(number_of, np.full(number_of, 1 / number_of), _RESAMPLES)
    means = (draws @ sums) / np.maximum(draws @ tokens, 1.0)
    low, high = np.quantile(means[:, 0] - means[:, 1], [level / 2, 1 - level / 2])
    return (float(low), float(high)) if math.isfinite(float(low)) else (-math.inf, math.inf)


def comparison_lines(new: Certificate, old: Certificate, moved: list[Moved]) -> list[str]:
    """Return the comparison as text."""
    compared = sum(old.row(row.name) is not None for row in new.rows)
    if not moved:
        return [f"None of {compared} rows became worse or better than in the certificate of {old.made_at}."]
    order = ("worse", "not compared", "new", "better")
    return [
        f"{each.change}: {each.row}: {each.sentence}" for each in sorted(moved, key=lambda one: order.index(one.change))
    ]
