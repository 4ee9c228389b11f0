"""Single log-probs that are wrong: not finite, above 0, above 1, or rounded to a shorter type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.counting import COLUMNS, EvidenceBuilder, Piece
from foreshock.lint.report import Clean, Example, Finding, NotChecked, Outcome, format_number, format_percent
from foreshock.rollouts.arrays import row_of_position
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import LARGEST_LOG_PROB, LEAST_LOG_PROB, LOG_PROB_ROUNDING, are_log_probs
from foreshock.severity import Severity

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence


_MOST_SAMPLED = 1 << 16
# Nearer to 0, float32 log-probs are multiples of a coarse step and often fit into a shorter type by chance.
_LEAST_SIZE = 0.01
# Larger values rarely fit by chance: a difference of logits in the hundreds still has six bits more than float16.
_LARGE = 0.5


def count_values(batch: RolloutBatch, piece: Piece, name: str, builder: EvidenceBuilder) -> NDArray[np.bool_] | None:
    """Count the invalid values of a column; return a mask [T] of the valid log-probs, or None if all are valid."""
    values = piece.column(name)
    if values is None or values.size == 0:
        return None
    # Two reductions are enough for a valid column: NaN, ±inf and placeholders show in min() or max().
    least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    builder.count(**{f"{name}_logged": values.size})
    finite: NDArray[np.bool_] | None = None
    valid: NDArray[np.bool_] | None = None
    if not (least >= LEAST_LOG_PROB and most <= LARGEST_LOG_PROB):
        finite, valid = np.isfinite(values), are_log_probs(values)
        _count_placeholders(batch, piece, name, values, finite & ~valid, builder)
        nan = int(np.isnan(values).sum())
        minus = int(np.isneginf(values).sum())
        plus = int(values.size - finite.sum()) - nan - minus
        builder.count(**{f"{name}_nan": nan, f"{name}_minus_inf": minus, f"{name}_plus_inf": plus})
        places = np.flatnonzero(~finite)
        first, last = np.isin(places, piece.offsets[:-1]), np.isin(places, piece.offsets[1:] - 1)
        builder.count(**{f"{name}_non_finite_first": int(first.sum()), f"{name}_non_finite_last": int(last.sum())})
        _add_examples(batch, piece, ~finite, "non_finite_log_probs", name, values, builder)
        kept = values[finite]
        least, most = float(kept.min(initial=np.inf)), float(kept.max(initial=-np.inf))
    builder.raise_extremes({f"{name}_max": most, f"{name}_minus_min": -least})
    if most > LOG_PROB_ROUNDING:
        with np.errstate(invalid="ignore"):
            positive = (values > LOG_PROB_ROUNDING) & np.isfinite(values)
            above_one = (values > 1.0 + LOG_PROB_ROUNDING) & np.isfinite(values)
        builder.count(**{f"{name}_positive": int(positive.sum()), f"{name}_above_one": int(above_one.sum())})
        _add_examples(batch, piece, positive, "positive_log_probs", name, values, builder)
    if least < -LOG_PROB_ROUNDING and most > -np.inf:
        with np.errstate(invalid="ignore"):
            below = int(np.count_nonzero(values < -LOG_PROB_ROUNDING))
        builder.count(**{f"{name}_negative": below - (0 if finite is None else int(np.isneginf(values).sum()))})
    return valid


def _count_placeholders(
    batch: RolloutBatch,
    piece: Piece,
    name: str,
    values: NDArray[np.float32],
    found: NDArray[np.bool_],
    builder: EvidenceBuilder,
) -> None:
    """Count finite values that are no log-probs of sampled tokens, such as −9999 for −inf."""
    chosen = values[found]
    if chosen.size:
        above = int(np.count_nonzero(chosen > 0))
        places = np.flatnonzero(found)
        beside = int((np.isin(places + 1, places) | np.isin(places - 1, places)).sum())
        builder.count(
            **{
                f"{name}_placeholders": chosen.size,
                f"{name}_placeholders_above": above,
                f"{name}_placeholders_beside": beside,
            }
        )
        ends = {f"{name}_placeholder_max": chosen.max(), f"{name}_placeholder_minus_min": -chosen.min()}
        builder.raise_extremes({end: float(value) for end, value in ends.items()})
        _add_examples(batch, piece, found, "placeholder_log_probs", name, values, builder)


def count_rounding(batch: RolloutBatch, name: str, builder: EvidenceBuilder) -> None:
    """Count the log-probs of an even sample of tokens that fit exactly into bfloat16 or float16."""
    column = batch.rollout_log_probs if name == "rollout" else batch.trainer_log_probs
    if column is None:
        return
    stride = max(1, column.size // _MOST_SAMPLED)
    sample = np.ascontiguousarray(column[::stride])
    sizes = np.abs(sample)
    chosen = (sizes > _LEAST_SIZE) & are_log_probs(sample)
    if batch.response_mask is not None:
        chosen &= batch.response_mask[::stride] != 0
    # A constant such as −3.0 fits into any type, and was not rounded.
    if builder.constants[name].size:
        chosen &= ~np.isin(sample, builder.constants[name])
    values = sample[chosen]
    bits = values.view(np.uint32)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
        as_half = half.astype(np.float32) == values
    as_bfloat16 = (bits & np.uint32(0xFFFF)) == 0
    large = np.abs(values) >= np.float32(_LARGE)
    # The power of two at or below |x|; a bfloat16 has 7 more bits, a float16 has 10.
    power = (bits & np.uint32(0x7F800000)).view(np.float32).astype(np.float64)
    square = float(np.square(power).sum())
    builder.count(
        **{
            f"{name}_rounding_seen": values.size,
            f"{name}_as_bfloat16": int(np.count_nonzero(as_bfloat16)),
            f"{name}_as_float16": int(np.count_nonzero(as_half)),
            f"{name}_large_seen": int(np.count_nonzero(large)),
            f"{name}_large_as_bfloat16": int(np.count_nonzero(as_bfloat16 & large)),
            f"{name}_large_as_float16": int(np.count_nonzero(as_half & large)),
        }
    )
    builder.add(**{f"{name}_bfloat16_variance": square / 2.0**14, f"{name}_float16_variance": square / 2.0**20})


def example_at(batch: RolloutBatch, place: int, text: str) -> Example:
    """Return a token of the batch as an example; `place` is its position in the flat columns."""
    row = row_of_position(batch.response_offsets, place)
    return Example(batch.sample_ids[row], place - int(batch.response_offsets[row]), text)


def _add_examples(
    batch: RolloutBatch,
    piece: Piece,
    wrong: NDArray[np.bool_],
    check: str,
    name: str,
    values: NDArray[np.float32],
    builder: EvidenceBuilder,
) -> None:
    if not builder.has_room(check):
        return
    for index in np.flatnonzero(wrong)[:3].tolist():
        text = f"{name} log-prob {values[index]:.6g}"
        builder.add_example(check, example_at(batch, piece.place(index), text))


_SIGNS = ("probabilities_as_log_probs", "negated_log_probs", "positive_log_probs")
_LEAST_ROUNDING_SEEN = 50
# A part of a column counts as rounded from here on: far more than chance gives among values of 0.5 or more.
_LEAST_PARTLY, _PARTLY = 20, 0.1
_ALL = 0.999
_MOST_BESIDE = 0.9
_NAMES = {"rollout": "rollout_log_probs", "trainer": "trainer_log_probs"}


def columns_without_log_probs(evidence: LintEvidence) -> list[str]:
    """Return the columns whose values are probabilities, or log-probs of the wrong sign."""
    return [_NAMES[name] for name in COLUMNS if _sign_check(evidence, name) in _SIGNS[:2]]


def check_signs(evidence: LintEvidence) -> list[Outcome]:
    """Check for placeholders, probabilities, negated log-probs, and values slightly above 0."""
    if not any(evidence.count(f"{name}_logged") for name in COLUMNS):
        return [NotChecked(check, "no log-probs were logged") for check in ("placeholder_log_probs", *_SIGNS)]
    found: dict[str, list[str]] = {check: [] for check in _SIGNS}
    numbers: dict[str, dict[str, float]] = {check: {} for check in _SIGNS}
    for name in COLUMNS:
        check = _sign_check(evidence, name)
        if check is None:
            continue
        positive, logged = evidence.count(f"{name}_positive"), evidence.count(f"{name}_logged")
        least, most = -evidence.extreme(f"{name}_minus_min"), evidence.extreme(f"{name}_max")
        if check == "positive_log_probs":
            positive -= evidence.count(f"{name}_placeholders_above")
            most = min(most, LARGEST_LOG_PROB)
            found[check].append(
                f"{positive:,} of {logged:,} values of {_NAMES[name]} ({format_percent(positive, logged)}) are above "
                f"0, by at most {format_number(most)}, as of rounded logits; they are measured"
            )
        else:
            found[check].append(
                f"{positive:,} of {logged:,} values of {_NAMES[name]} ({format_percent(positive, logged)}) are above "
                f"0; they range from {format_number(least)} to {format_number(most)}"
            )
        numbers[check] |= {f"{name}_positive": positive, f"{name}_min": least, f"{name}_max": most}
    where = evidence.where("positive_log_probs")
    outcomes: list[Outcome] = [_placeholders(evidence)]
    for check in _SIGNS:
        severity: Severity = "warning" if check == "positive_log_probs" else "critical"
        seen = "; ".join(found[check]) + "."
        outcomes.append(Finding(check, severity, seen, numbers[check], where) if found[check] else Clean(check))
    return outcomes


def _placeholders(evidence: LintEvidence) -> Outcome:
    """Check for placeholders: values that were set apart because no sampled token has such a log-prob."""
    check = "placeholder_log_probs"
    parts: list[str] = []
    numbers: dict[str, float] = {}
    for name in COLUMNS:
        if (count := evidence.count(f"{name}_placeholders")) and _sign_check(evidence, name) not in _SIGNS[:2]:
            ends = -evidence.extreme(f"{name}_placeholder_minus_min"), evidence.extreme(f"{name}_placeholder_max")
            of = format_number(ends[0]) if ends[0] == ends[1] else " to ".join(map(format_number, ends))
            logged = evidence.count(f"{name}_logged")
            runs = evidence.count(f"{name}_placeholders_beside") >= _MOST_BESIDE * count
            where = (
                " and stand in runs, as of tokens that the model did not sample, or that were not scored"
                if runs
                else ""
            )
            parts.append(f"{count:,} of {logged:,} values of {_NAMES[name]} are {of}{where}")
            numbers |= {f"{name}_placeholders": float(count), f"{name}_least": ends[0], f"{name}_largest": ends[1]}
    hidden = evidence.count("masked_placeholders")
    ignored = f"{hidden:,} placeholders at masked tokens are ignored" if hidden else ""
    if not parts:
        return Clean(check, ignored)
    where = next((f", such as token {each.token} of {each.sample_id}" for each in evidence.where(check)), "")
    seen = (
        f"{'; '.join(parts)}: no sampled token has such a log-prob. They are set apart{where}; all others are measured."
        f"{f' {ignored}.' if ignored else ''}"
    )
    return Finding(check, "warning", seen, numbers)


def _sign_check(evidence: LintEvidence, name: str) -> str | None:
    """Return the check that the positive values of a column belong to; None if there are none."""
    positive, logged = evidence.count(f"{name}_positive"), evidence.count(f"{name}_logged")
    if not positive:
        return None
    if positive < 0.5 * logged or evidence.count(f"{name}_negative"):
        return "positive_log_probs" if positive > evidence.count(f"{name}_placeholders_above") else None
    return "negated_log_probs" if evidence.count(f"{name}_above_one") else "probabilities_as_log_probs"


def check_finite(evidence: LintEvidence) -> Outcome:
    """Check for NaN and infinite values at generated tokens."""
    check = "non_finite_log_probs"
    if not any(evidence.count(f"{name}_logged") for name in COLUMNS):
        return NotChecked(check, "no log-probs were logged")
    kinds = {"nan": "NaN", "minus_inf": "−inf", "plus_inf": "+inf"}
    numbers = {f"{name}_{kind}": float(evidence.count(f"{name}_{kind}")) for name in COLUMNS for kind in kinds}
    if not any(numbers.values()):
        return Clean(check)
    parts = []
    for name in COLUMNS:
        counted = [f"{int(n):,} {text}" for kind, text in kinds.items() if (n := numbers[f"{name}_{kind}"])]
        if counted:
            total = int(sum(numbers[f"{name}_{kind}"] for kind in kinds))
            logged = evidence.count(f"{name}_logged")
            parts.append(f"{_NAMES[name]}: {', '.join(counted)} of {logged:,}{_place(evidence, name, total)}")
    return Finding(check, "warning", "; ".join(parts) + ".", {name: value for name, value in numbers.items() if value})


def _place(evidence: LintEvidence, name: str, total: int) -> str:
    """Return a clause if all non-finite values stand at the same end of the responses; else an empty string."""
    for end in ("first", "last"):
        if total > 1 and evidence.count(f"{name}_non_finite_{end}") == total < evidence.count(f"{name}_logged") / 2:
            return f", each at the {end} token of its response"
    return ""


def check_rounding(evidence: LintEvidence) -> Outcome:
    """Check for columns, or parts of them, whose values all fit into bfloat16 or float16."""
    check = "rounded_log_probs"
    parts: list[str] = []
    numbers: dict[str, float] = {}
    enough = False
    for name in COLUMNS:
        seen = evidence.count(f"{name}_rounding_seen")
        if seen < _LEAST_ROUNDING_SEEN or evidence.extreme(f"{name}_max") == -evidence.extreme(f"{name}_minus_min"):
            continue
        enough = True
        kind = short_type(evidence, name)
        if kind is None:
            continue
        fitting, large = evidence.count(f"{name}_as_{kind}"), evidence.count(f"{name}_large_seen")
        if fitting >= _ALL * seen:
            # A uniform error over the last place has a variance of 1/12, and k3 is half the square of d.
            floor = evidence.sum(f"{name}_{kind}_variance") / seen / 24.0
            parts.append(
                f"{fitting:,} of {seen:,} sampled values of {_NAMES[name]} fit into {kind}; this rounding alone gives "
                f"a k3 of about {format_number(floor)} at these tokens"
            )
            numbers |= {f"{name}_as_{kind}": float(fitting), f"{name}_seen": float(seen), f"{name}_k3_floor": floor}
        else:
            fitting = evidence.count(f"{name}_large_as_{kind}")
            parts.append(
                f"{fitting:,} of {large:,} sampled values of {_NAMES[name]} below −0.5 fit into {kind}, and the others "
                "do not: a part of the rollouts was rounded"
            )
            numbers |= {f"{name}_as_{kind}": float(fitting), f"{name}_seen": float(large)}
    if parts:
        return Finding(check, "warning", "; ".join(parts) + ".", numbers)
    return Clean(check) if enough else NotChecked(check, f"fewer than {_LEAST_ROUNDING_SEEN} uncertain tokens")


def short_type(evidence: LintEvidence, name: str) -> str | None:
    """Return the type that a column, or a good part of its values of 0.5 or more, fits into; None if neither does."""
    seen, large = evidence.count(f"{name}_rounding_seen"), evidence.count(f"{name}_large_seen")
    for kind in ("bfloat16", "float16"):
        # bfloat16 first: in the range of log-probs a bfloat16 nearly always fits into float16 too.
        if evidence.count(f"{name}_as_{kind}") >= _ALL * seen:
            return kind
    halves, brains = (evidence.count(f"{name}_large_as_{kind}") for kind in ("float16", "bfloat16"))
    if halves < max(_LEAST_PARTLY, _PARTLY * large):
        return None
    return "bfloat16" if brains > halves / 2 else "float16"
