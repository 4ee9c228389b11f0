"""Pairs of log-probs: equal numbers, a mean ratio off 1, and a k3 that is too large for the entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.after_id import LARGE_D
from foreshock.lint.alignment import NO_PAIRS
from foreshock.lint.counting import NO_MU_VALUES, EvidenceBuilder, Piece
from foreshock.lint.report import (
    FALSE_ALARM,
    LEAST_GROUPS,
    Clean,
    Example,
    Finding,
    NotChecked,
    Outcome,
    format_number,
    format_percent,
    title_of_part,
)
from foreshock.lint.sampling import is_entropy
from foreshock.lint.values import example_at, short_type
from foreshock.measures.estimators.intervals import student_t_quantile
from foreshock.model_kind import MODEL_KIND_NAMES, ModelKind
from foreshock.ranges import required_range
from foreshock.rollouts.arrays import row_sums
from foreshock.rollouts.batch import RolloutBatch
from foreshock.severity import Severity

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence


# A token with log μ below this is uncertain: two computations of it agree in every bit by chance at most.
_UNCERTAIN = -0.01
# Truncation keeps more than a fifth of the mass: d is not below log 0.2.
_FAR_BELOW = -1.6
# |d| above this is clearly not 0.
_CLEARLY = 0.01
_CERTAIN = -1e-6
# This many uncertain tokens of a rollout agree bit for bit only if one column is a copy of the other.
_LEAST_COPIED = 8
# d is cut off here, which keeps sums of ρ finite; ρ = e^20 already moves any mean.
_LARGEST_D = 20.0


def count_pairs(batch: RolloutBatch, piece: Piece, builder: EvidenceBuilder) -> tuple[NDArray[np.float64], ...]:
    """Return Σ(ρ − 1) and Σ(ρ − 1 − d) by rollout, each of shape [N].

    Both log-probs of every token of the piece must be finite.
    """
    behaviour, target = piece.rollout, piece.trainer
    assert behaviour is not None
    assert target is not None
    equal, uncertain = behaviour == target, behaviour < np.float32(_UNCERTAIN)
    builder.count(paired=piece.tokens, equal=int(np.count_nonzero(equal)), uncertain=int(np.count_nonzero(uncertain)))
    uncertain_of_rows = row_sums(uncertain, piece.offsets)
    copiable = uncertain_of_rows >= _LEAST_COPIED
    copied = equal & uncertain
    builder.count(copiable_rollouts=int(copiable.sum()))
    if np.count_nonzero(copied) >= _LEAST_COPIED:
        whole = copiable & (row_sums(copied, piece.offsets) == uncertain_of_rows)
        builder.count(copied_rollouts=int(whole.sum()))
    d = target - behaviour
    above, below = d > np.float32(_CLEARLY), d < np.float32(-_CLEARLY)
    certain = below & (behaviour >= np.float32(_CERTAIN))
    found = int(np.count_nonzero(certain))
    builder.count(
        above_zero=int(np.count_nonzero(above)),
        below_zero=int(np.count_nonzero(below)),
        far_below_zero=int(np.count_nonzero(d < np.float32(_FAR_BELOW))),
        certain_behaviour=found,
    )
    if found and builder.has_room("processed_log_probs"):
        for index in np.flatnonzero(certain)[:3].tolist():
            text = f"log μ {behaviour[index]:.3g}, log π {target[index]:.3g}"
            builder.add_example("processed_log_probs", example_at(batch, piece.place(index), text))
    if found or builder.constants["rollout"].size:
        _count_without_behaviour(batch, piece, below | (above & (behaviour != 0)), builder)
    builder.count(large=int(np.count_nonzero(d >= np.float32(LARGE_D)) + np.count_nonzero(d <= np.float32(-LARGE_D))))
    _count_clipped(batch, d, builder)
    np.minimum(d, np.float32(_LARGEST_D), out=d)
    of_d = row_sums(d, piece.offsets)
    # Not in float32: there expm1 rounds differently on CPUs with and without AVX-512.
    beyond_one = np.expm1(d, dtype=np.float64)
    of_ratio = row_sums(beyond_one, piece.offsets)
    builder.add(paired_k3=float((of_ratio - of_d).sum()), paired_surprisal=-float(behaviour.sum(dtype=np.float64)))
    if piece.entropy is not None and is_entropy(piece.entropy).all():
        weighted = float((beyond_one * target).sum()) + float(target.sum(dtype=np.float64))
        builder.add(target_surprisal=-weighted, target_entropy=float(piece.entropy.sum(dtype=np.float64)))
    return of_ratio, of_ratio - of_d


def _count_clipped(batch: RolloutBatch, d: NDArray[np.float32], builder: EvidenceBuilder) -> None:
    """Count the tokens with ρ outside the declared clip range."""
    low, high = batch.attributes.clip_low, batch.attributes.clip_high
    if low is None and high is None:
        return
    low, high = (float(high or 0.0) if low is None else low), (float(low or 0.0) if high is None else high)
    outside = d > np.float32(math.log1p(high))
    if low < 1.0:
        outside |= d < np.float32(math.log1p(-low))
    builder.count(clip_known=d.size, clipped=int(np.count_nonzero(outside)))
    builder.raise_extremes({"max_clip_low": low, "max_clip_high": high})


def _count_without_behaviour(
    batch: RolloutBatch, piece: Piece, differs: NDArray[np.bool_], builder: EvidenceBuilder
) -> None:
    """Count tokens with log μ = 0 or a constant at which log π `differs`; also by position in the response.

    Positions: the first token, the last, and runs: such a log μ at every token up to the last one.
    """
    assert piece.rollout is not None
    assert piece.trainer is not None
    zeros = np.flatnonzero(np.isin(piece.rollout, [0.0, *builder.constants["rollout"]]))
    rows = np.searchsorted(piece.offsets, zeros, side="right") - 1
    ends = piece.offsets[rows + 1]
    zeros_after = np.searchsorted(zeros, ends) - 1 - np.arange(zeros.size)
    # A response with log μ = 0 everywhere has no such run: greedy sampling logged as processed gives that too.
    lengths = np.diff(piece.offsets)
    trailing = (zeros_after == ends - 1 - zeros) & (np.bincount(rows, minlength=lengths.size) < lengths)[rows]
    missing = differs[zeros]
    last = zeros == ends - 1
    builder.count(
        no_mu=int(missing.sum()),
        no_mu_first=int((missing & (zeros == piece.offsets[rows])).sum()),
        no_mu_last=int((missing & last).sum()),
        no_mu_trailing=int((missing & trailing).sum()),
    )
    places = zeros[missing]
    beside = np.isin(places + 1, places) | np.isin(places - 1, places)
    builder.count(no_mu_beside=int(beside.sum()))
    log_mu = piece.rollout[places].astype(np.float64)
    log_pi = np.maximum(piece.trainer[places].astype(np.float64), -_LARGEST_D)
    d = log_pi - log_mu
    builder.add(no_mu_log_pi=float(log_pi.sum()), no_mu_k3=float((np.expm1(d) - d).sum()))
    for value in np.unique(log_mu).tolist():
        builder.add_example(NO_MU_VALUES, Example(format_number(value + 0.0)))
    for index in places[:3].tolist():
        of_mu = format_number(float(piece.rollout[index]) + 0.0)
        text = f"id {batch.response_token_ids[piece.place(index)]}, log μ {of_mu}, log π {piece.trainer[index]:.3g}"
        builder.add_example("tokens_without_engine", example_at(batch, piece.place(index), text))


_LEAST_UNCERTAIN = 20
# Published mismatches move mean ρ by less than 0.1 %; the worst mixture of experts by about 1 %.
_LEAST_RATIO_ERROR = 0.02
_LEAST_CERTAIN = 20
_CERTAIN_SHARE = 0.01
_ONE_SIDED = 0.2
# Rounded logits make likely tokens certain, and d of the others has both signs: a ratio of 0.14 or more was measured.
_ONE_SIDED_IF_ROUNDED = 0.05
_LEAST_COPIED_ROLLOUTS, _COPIED_SHARE = 2, 0.05
# If truncation is declared, or tokens are certain under μ only, this much missing mass is enough: it biases k3 as much
# as a mismatch does.
_LEAST_CUT = 0.002
_CUT_LEVEL = 0.999
_TOP_P_SLACK = 0.05
_FAR_BELOW_SHARE = 0.02


def check_identical(evidence: LintEvidence) -> Outcome:
    """Check for a log π that equals log μ in every bit."""
    check = "identical_log_probs"
    paired, uncertain = evidence.count("paired"), evidence.count("uncertain")
    if not paired:
        return NotChecked(check, NO_PAIRS)
    if evidence.count("equal") < paired:
        return _partly_copied(evidence)
    if uncertain < _LEAST_UNCERTAIN:
        return NotChecked(check, f"fewer than {_LEAST_UNCERTAIN} uncertain tokens: certain ones agree anyway")
    bypass = evidence.count("declared_bypass") == evidence.count("rollouts")
    seen = (
        f"{paired:,} of {paired:,} differences are exactly 0, {uncertain:,} of them at tokens with log μ below −0.01"
        f"{'; bypass is declared' if bypass else ''}."
    )
    severity: Severity = "warning" if evidence.count("declared_policy") == evidence.count("rollouts") else "critical"
    return Finding(check, severity, seen, {"tokens": paired, "uncertain_tokens": uncertain})


def _partly_copied(evidence: LintEvidence) -> Outcome:
    """Check for rollouts in which log π equals log μ at every uncertain token, beside others in which it does not."""
    check = "identical_log_probs"
    copied, copiable = evidence.count("copied_rollouts"), evidence.count("copiable_rollouts")
    if copied < max(_LEAST_COPIED_ROLLOUTS, _COPIED_SHARE * copiable):
        return Clean(check)
    seen = f"{copied:,} of {copiable:,} rollouts have log π equal to log μ at every uncertain token; the others do not."
    counts = {"copied_rollouts": copied, "rollouts": copiable}
    return Finding(check, "warning", seen, counts, title=title_of_part(check))


def check_mean_ratio(evidence: LintEvidence) -> tuple[Outcome, Outcome]:
    """Check for processed log-probs, and for a mean ρ off 1 for any other reason."""
    processed, other = "processed_log_probs", "mean_ratio"
    paired = evidence.count("paired")
    if not paired:
        return NotChecked(processed, NO_PAIRS), NotChecked(other, NO_PAIRS)
    mean, t = evidence.groups.mean_and_t("ratio_minus_one")
    groups = evidence.groups.with_tokens
    tested = groups >= LEAST_GROUPS and math.isfinite(mean) and not math.isnan(t)
    cut = evidence.count("processed_and_truncated")
    significant = tested and abs(t) >= student_t_quantile(1 - FALSE_ALARM / 2, groups - 1)
    off = significant and abs(mean) >= _LEAST_RATIO_ERROR
    certain = evidence.count("certain_behaviour")
    above, below = evidence.count("above_zero"), evidence.count("below_zero")
    one_sided = below >= _LEAST_CERTAIN and above <= _ONE_SIDED * below
    numbers = {"mean_ratio": 1.0 + mean, "t": t, "groups": groups, "certain_under_mu_only": certain}
    numbers |= {"d_above_0.01": above, "d_below_minus_0.01": below}
    mean_text = f"Mean ρ is {format_number(1.0 + mean)}{_interval(mean, t, groups)}"
    too_few = NotChecked(other, f"the error of mean ρ needs {LEAST_GROUPS} prompt groups, and there are {groups}")
    truncated = (off and mean < 0 and one_sided) or (cut and significant and mean <= -_LEAST_CUT)
    truncated = truncated or _certain_by_truncation(evidence, mean, t, groups)
    if truncated and _may_be_truncated(evidence, mean):
        seen = (
            f"{mean_text}; d is below −0.01 at {below:,} tokens and above 0.01 at {above:,}; {certain:,} tokens "
            f"({format_percent(certain, paired)}) are certain under μ and not under π."
        )
        return Finding(processed, "critical", seen, numbers), NotChecked(other, "explained by processed log-probs")
    if not tested:
        return NotChecked(processed, too_few.why), too_few
    if off:
        return Clean(processed), Finding(other, "warning", f"{mean_text}, Student's t {format_number(t)}.", numbers)
    return Clean(processed), Clean(other)


def _certain_by_truncation(evidence: LintEvidence, mean: float, t: float, groups: int) -> bool:
    """Return True if truncation explains the tokens that are certain under μ only, however small its effect.

    Log-probs of rounded logits, or rounded to few decimals, make tokens certain too. But rounding moves d both ways and
    leaves mean ρ near 1, within 0.01 for bfloat16. Truncation moves all d below 0, though a mismatch may hide that.
    """
    certain, paired = evidence.count("certain_behaviour"), evidence.count("paired")
    above, below = evidence.count("above_zero"), evidence.count("below_zero")
    if certain < max(_LEAST_CERTAIN, _CERTAIN_SHARE * paired):
        return False
    if evidence.count("declared_plain") == evidence.count("rollouts"):
        return False
    rounded = short_type(evidence, "rollout") is not None
    if above <= (_ONE_SIDED_IF_ROUNDED if rounded else _ONE_SIDED) * below:
        return True
    tested = groups >= LEAST_GROUPS and math.isfinite(mean) and not math.isnan(t)
    return tested and not rounded and mean <= -_LEAST_CUT and t <= -student_t_quantile(_CUT_LEVEL, groups - 1)


def _may_be_truncated(evidence: LintEvidence, mean: float) -> bool:
    """Return False if what was declared contradicts a truncated μ, or if d is of a size that truncation cannot make."""
    if evidence.count("mode_raw") == evidence.count("rollouts"):
        return False
    declared = -evidence.extreme("minus_min_top_p")
    # Top-p keeps at least p.
    if evidence.count("declared_truncated") == evidence.count("rollouts") and not evidence.extreme("max_min_p") > 0:
        top_k = -evidence.extreme("minus_min_top_k")
        if not (math.isfinite(top_k) and top_k > 0) and 0 < declared < 1 and 1.0 + mean < declared - _TOP_P_SLACK:
            return False
    return evidence.count("far_below_zero") <= _FAR_BELOW_SHARE * max(evidence.count("below_zero"), 1)


def _interval(mean: float, t: float, groups: int) -> str:
    """Return the interval of mean ρ by Student's t, clustered by prompt group, as text."""
    if groups < 2 or not math.isfinite(t) or t == 0.0:
        return ""
    reach = student_t_quantile(0.975, groups - 1) * abs(mean / t)
    low, high = format_number(1.0 + mean - reach), format_number(1.0 + mean + reach)
    return f" (Student's t: {low} to {high} over {groups:,} prompt groups)"


# PPO clips a few tokens in a thousand after its updates; before them, at equal weights, it should clip none.
_LEAST_CLIPPED = 0.01


def check_clipping(evidence: LintEvidence) -> Outcome:
    """Check for tokens that are outside the clip range before any update, because of the mismatch alone."""
    check, known = "clipped_before_update", evidence.count("clip_known")
    if not known:
        return NotChecked(check, "needs both log-probs, and clip_low or clip_high among the batch attributes")
    clipped = evidence.count("clipped")
    if clipped < _LEAST_CLIPPED * known:
        return Clean(check)
    low, high = 1.0 - evidence.extreme("max_clip_low"), 1.0 + evidence.extreme("max_clip_high")
    seen = (
        f"{clipped:,} of {known:,} tokens ({format_percent(clipped, known)}) have a ρ outside the clip range "
        f"{format_number(low)} to {format_number(high)} before any update."
    )
    return Finding(check, "info", seen, {"clipped": clipped, "tokens": known, "share": clipped / known})


_CHECK, _MEASURE = "k3_per_entropy", "k3_kl_per_entropy"
_LEAST_GROUPS = 4
_LEVEL = 0.975


def check_k3_per_entropy(
    evidence: LintEvidence, entropy: float | None = None, model_kind: ModelKind | None = None
) -> Outcome:
    """Check that k3 / mean entropy is in the healthy range, at the lower end of k3's interval (Student's t).

    The mean entropy is over the rollouts' tokens; without any it is `entropy`, which the trainer logged, in nats. A few
    tokens of one prompt can give half of k3, so the interval is clustered by prompt group.
    """
    if not evidence.count("paired"):
        return NotChecked(_CHECK, "needs rollout_log_probs and trainer_log_probs")
    tokens = evidence.count("surprisal_tokens")
    mean_entropy = evidence.sum("entropy") / tokens if tokens else entropy
    if mean_entropy is None or not mean_entropy > 0:
        return NotChecked(_CHECK, "needs entropies, of the tokens or as a scalar of the step")
    groups = evidence.groups.with_tokens
    k3, t = evidence.groups.mean_and_t("k3")
    if groups < _LEAST_GROUPS or not math.isfinite(k3):
        return NotChecked(_CHECK, f"the interval of k3 needs {_LEAST_GROUPS} prompt groups, and there are {groups}")
    error = k3 / t if t and math.isfinite(t) else 0.0
    low = (k3 - student_t_quantile(_LEVEL, groups - 1) * error) / mean_entropy
    known = required_range(_MEASURE, model_kind or "moe")
    verdict = known.verdict(low)
    if verdict not in ("warning", "critical"):
        return Clean(_CHECK)
    healthy = required_range("k3_kl", model_kind or "moe").warning
    if healthy is not None and k3 > healthy:
        return Clean(_CHECK, "k3 itself is beyond its healthy range")
    assert known.warning is not None
    kind = MODEL_KIND_NAMES[model_kind or "moe"]
    source = f"over {tokens:,} tokens" if tokens else "a scalar of the trainer"
    seen = (
        f"k3 averages {format_number(k3)} and the entropy {format_number(mean_entropy)} nats ({source}). Their ratio "
        f"is {format_number(k3 / mean_entropy)}, by Student's t over {groups:,} prompt groups at least "
        f"{format_number(low)}; up to {format_number(known.warning)} is healthy for a {kind}."
    )
    numbers = {"k3": k3, "entropy": mean_entropy, "ratio": k3 / mean_entropy, "ratio_low": low, "prompt_groups": groups}
    return Finding(_CHECK, "critical" if verdict == "critical" else "warning", seen, numbers)
