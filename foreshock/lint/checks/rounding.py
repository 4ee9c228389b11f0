"""Log-probs that were rounded to bfloat16 or float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreshock.lint.checks.values import VALUES
from foreshock.lint.counting import COLUMNS, Counting, Counts
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number
from foreshock.rollouts.schema import are_log_probs

_MOST_SAMPLED = 1 << 16
# Nearer to 0, float32 log-probs are multiples of a coarse step and often fit into a shorter type by chance.
_LEAST_SIZE = 0.01
# Larger values rarely fit by chance: a difference of logits in the hundreds still has six bits more than float16.
_LARGE = 0.5
_LEAST_SEEN = 50
# A part of a column counts as rounded from here on: far more than chance gives among values of 0.5 or more.
_LEAST_PARTLY, _PARTLY = 20, 0.1
_ALL = 0.999


@dataclass
class Rounding(Counts, abstract=True):
    """The values of an even sample of the tokens of a column that fit exactly into a shorter type."""

    column: ClassVar[str]

    seen: int = 0
    as_bfloat16: int = 0
    as_float16: int = 0
    large: int = 0  # of `seen`: |log-prob| of 0.5 or more; few such values fit by chance
    large_as_bfloat16: int = 0
    large_as_float16: int = 0
    bfloat16_variance: float = 0.0  # Σ of the squared spacing of the values of the type
    float16_variance: float = 0.0

    def add_batch(self, counting: Counting) -> None:
        batch = counting.batch
        column = getattr(batch, COLUMNS[self.column])
        if column is None:
            return
        stride = max(1, column.size // _MOST_SAMPLED)
        sample = np.ascontiguousarray(column[::stride])
        chosen = (np.abs(sample) > _LEAST_SIZE) & are_log_probs(sample)
        if batch.response_mask is not None:
            chosen &= batch.response_mask[::stride] != 0
        # A constant such as −3.0 fits into any type, and was not rounded.
        if counting.constants[self.column].size:
            chosen &= ~np.isin(sample, counting.constants[self.column])
        values = sample[chosen]
        bits = values.view(np.uint32)
        as_half = values.astype(np.float16).astype(np.float32) == values
        as_bfloat16 = (bits & np.uint32(0xFFFF)) == 0
        large = np.abs(values) >= np.float32(_LARGE)
        # The power of two at or below |x|; a bfloat16 has 7 more bits, a float16 has 10.
        power = (bits & np.uint32(0x7F800000)).view(np.float32).astype(np.float64)
        square = float(np.square(power).sum())
        self.add(seen=values.size, as_bfloat16=as_bfloat16, as_float16=as_half, large=large)
        self.add(large_as_bfloat16=as_bfloat16 & large, large_as_float16=as_half & large)
        self.add(bfloat16_variance=square / 2.0**14, float16_variance=square / 2.0**20)

    @property
    def short_type(self) -> str:
        """The type that the column, or a good part of its values of 0.5 or more, fits into; empty if neither does."""
        # bfloat16 first: in the range of log-probs a bfloat16 nearly always fits into float16 too.
        if self.as_bfloat16 >= _ALL * self.seen:
            return "bfloat16"
        if self.as_float16 >= _ALL * self.seen:
            return "float16"
        if self.large_as_float16 < max(_LEAST_PARTLY, _PARTLY * self.large):
            return ""
        return "bfloat16" if self.large_as_bfloat16 > self.large_as_float16 / 2 else "float16"


class RolloutRounding(Rounding):
    """Rounding of log μ."""

    column = "rollout"


class TrainerRounding(Rounding):
    """Rounding of log π."""

    column = "trainer"


def _check(judging: Judging) -> Outcome:
    parts: list[str] = []
    numbers: dict[str, float] = {}
    enough = False
    for kind in (RolloutRounding, TrainerRounding):
        found, values = judging[kind], judging[VALUES[kind.column]]
        if found.seen < _LEAST_SEEN or values.max == -values.minus_min:
            continue
        enough = True
        name, short = kind.column, found.short_type
        if not short:
            continue
        fitting = getattr(found, f"as_{short}")
        if fitting >= _ALL * found.seen:
            # A uniform error over the last place has a variance of 1/12, and k3 is half the square of d.
            floor = getattr(found, f"{short}_variance") / found.seen / 24.0
            parts.append(
                f"{fitting:,} of {found.seen:,} sampled values of {COLUMNS[name]} fit into {short}; this rounding "
                f"alone gives a k3 of about {format_number(floor)} at these tokens"
            )
            numbers |= {f"{name}_as_{short}": fitting, f"{name}_seen": found.seen, f"{name}_k3_floor": floor}
        else:
            fitting = getattr(found, f"large_as_{short}")
            parts.append(
                f"{fitting:,} of {found.large:,} sampled values of {COLUMNS[name]} below −0.5 fit into {short}, and "
                "the others do not: a part of the rollouts was rounded"
            )
            numbers |= {f"{name}_as_{short}": fitting, f"{name}_seen": found.large}
    if parts:
        return Finding("warning", "; ".join(parts) + ".", numbers)
    return Clean() if enough else NotChecked(f"fewer than {_LEAST_SEEN} uncertain tokens")


ROUNDED = Check(
    "rounded_log_probs",
    "log-probs were rounded to a shorter type",
    "Rounding adds a mismatch of its own, which is larger for less likely tokens.",
    "Compute the log-softmax in float32 and keep float32 until it is logged.",
    _check,
)
