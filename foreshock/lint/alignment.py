"""Check how log μ and log π align: a shift by one token, two log bases, a temperature that the trainer ignores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.counting import EvidenceBuilder
from foreshock.lint.report import Clean, Example, Finding, NotChecked, Outcome, format_number, title_of_part
from foreshock.model_kind import ModelKind
from foreshock.ranges import required_range
from foreshock.rollouts.arrays import offsets_of_lengths, row_sums
from foreshock.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence


# A sample is enough: a shift affects every rollout of a rank or a data source. From a larger batch, one stretch of each
# of up to this many rollouts is taken. The stretches spread over the responses: a later turn may be shifted alone.
_MOST_TOKENS, _MOST_ROLLOUTS = 1 << 16, 1024
_SPREAD = 0.5 * (math.sqrt(5.0) - 1.0)
# Each difference counts at most this much, in nats, so that one outlier does not decide.
_SHIFT_CAP = 5.0
# A rollout is clearly shifted if it has this many tokens, a mean difference of 0.1 nats or more, and at most a quarter
# of that difference against the neighbouring token.
_CLEAR_TOKENS, _CLEAR_GAP, _CLEAR_FACTOR = 6, 0.1, 0.25
# In nats: a token above _LIKELY is likely; only log-probs between _LEAST_LOG_PROB and _BELOW_ZERO are used.
_LIKELY, _BELOW_ZERO, _LEAST_LOG_PROB = -1.0, -0.01, -100.0


class Sample(NamedTuple):
    """log μ [T] and log π [T] of one stretch of each of N rollouts, cut at `offsets` [N + 1].

    `rows` [N] are the rollouts' rows in the batch, `first_tokens` [N] the token of the response at which each begins.
    """

    behaviour: NDArray[np.float32]
    target: NDArray[np.float32]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    first_tokens: NDArray[np.int64]


def count_alignment(batch: RolloutBatch, builder: EvidenceBuilder) -> None:
    """Count shifts and factors over a sample of the rollouts, tool tokens included."""
    sample = _sample_of_rollouts(batch)
    if sample is not None:
        _count_scale(sample.behaviour, sample.target, builder)
        _count_shifts(batch, sample, builder)


def _sample_of_rollouts(batch: RolloutBatch) -> Sample | None:
    """Return the sample; None if either log-prob was not logged."""
    if batch.rollout_log_probs is None or batch.trainer_log_probs is None:
        return None
    if batch.num_tokens <= _MOST_TOKENS:
        rows = np.arange(batch.num_rollouts)
        whole = batch.rollout_log_probs, batch.trainer_log_probs, batch.response_offsets
        return Sample(*whole, rows, np.zeros(rows.size, np.int64))
    rows = np.arange(0, batch.num_rollouts, -(-batch.num_rollouts // _MOST_ROLLOUTS))
    lengths = batch.response_lengths[rows]
    taken = np.minimum(lengths, _MOST_TOKENS // rows.size)
    first = ((lengths - taken + 1) * (np.arange(rows.size) * _SPREAD % 1.0)).astype(np.int64)
    offsets = offsets_of_lengths(taken)
    begins = batch.response_offsets[:-1][rows] + first - offsets[:-1]
    positions = np.arange(offsets[-1]) + np.repeat(begins, taken)
    return Sample(batch.rollout_log_probs[positions], batch.trainer_log_probs[positions], offsets, rows, first)


def _count_scale(behaviour: NDArray[np.float32], target: NDArray[np.float32], builder: EvidenceBuilder) -> None:
    """Sum products of the two log-probs over likely and over unlikely tokens; a constant factor shows in both."""
    below = (behaviour < np.float32(_BELOW_ZERO)) & (target < np.float32(_BELOW_ZERO))
    chosen = (below & (behaviour > _LEAST_LOG_PROB) & (target > _LEAST_LOG_PROB)).nonzero()[0]
    mu, pi = behaviour[chosen], target[chosen]
    likely = mu > np.float32(_LIKELY)
    builder.count(scale_tokens=chosen.size)
    builder.add(scale_mu=float(mu.sum(dtype=np.float64)), scale_pi=float(pi.sum(dtype=np.float64)))
    for part, of_part in (("likely", likely), ("unlikely", ~likely)):
        one, other = mu * of_part.astype(np.float64), pi * of_part.astype(np.float64)
        for name, pair in (("cross", (one, other)), ("mu", (one, one)), ("pi", (other, other))):
            builder.add(**{f"scale_{part}_{name}": float(np.einsum("i,i", *pair))})


def _count_shifts(batch: RolloutBatch, sample: Sample, builder: EvidenceBuilder) -> None:
    """Sum |log π_t − log μ_{t+s}| for s = −1, 0, 1 over the tokens t that have a neighbour on both sides."""
    behaviour, target, offsets, rows_of_batch, first_tokens = sample
    if behaviour.size < 3:
        return
    inner = np.ones(behaviour.size, dtype=np.bool_)
    filled = (offsets[1:] - offsets[:-1]).nonzero()[0]
    inner[offsets[:-1][filled]] = False
    inner[offsets[1:][filled] - 1] = False
    inner[0] = inner[-1] = False
    chosen = inner.nonzero()[0]
    of_target = target[chosen]
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = [np.abs(of_target - behaviour[chosen + shift]) for shift in (-1, 0, 1)]
    known = np.isfinite(gaps[0]) & np.isfinite(gaps[1]) & np.isfinite(gaps[2])
    if not known.all():
        gaps = [np.where(known, gap, np.float32(0.0)) for gap in gaps]
    running = np.zeros(inner.size + 1, np.int64)
    np.cumsum(inner, out=running[1:])
    rows = running[offsets]
    earlier, own, later = (row_sums(np.minimum(gap, np.float32(_SHIFT_CAP)), rows) for gap in gaps)
    tokens = row_sums(known, rows)
    counted = tokens > 0
    prefer_earlier, prefer_later = counted & (earlier < 0.5 * own), counted & (later < 0.5 * own)
    far = (tokens >= _CLEAR_TOKENS) & (own >= _CLEAR_GAP * tokens)
    builder.count(
        shift_clear_earlier=int((far & (earlier <= _CLEAR_FACTOR * own)).sum()),
        shift_clear_later=int((far & (later <= _CLEAR_FACTOR * own)).sum()),
        shift_tokens=int(tokens.sum()),
        shift_rollouts=int(counted.sum()),
        shift_prefer_earlier=int(prefer_earlier.sum()),
        shift_prefer_later=int(prefer_later.sum()),
    )
    by_earlier, by_later = builder.counts["shift_prefer_earlier"], builder.counts["shift_prefer_later"]
    preferring = prefer_earlier if by_earlier >= by_later else prefer_later
    most = min(2, max(by_earlier, by_later))
    worst = np.argsort(np.where(preferring, -own, 0.0), kind="stable")[:most].tolist() if most else ()
    for row in worst:
        start = int(offsets[row])
        four = slice(start, min(start + 4, int(offsets[row + 1])))
        text = f"log μ {_join(behaviour[four])}, log π {_join(target[four])}"
        example = Example(batch.sample_ids[int(rows_of_batch[row])], int(first_tokens[row]), text)
        builder.add_example("shifted_log_probs", example)
    builder.add(shift_earlier=float(earlier.sum()), shift_none=float(own.sum()), shift_later=float(later.sum()))


def _join(values: NDArray[np.float32]) -> str:
    return " ".join(f"{value:.3g}" for value in values.tolist())


_LEAST_SHIFT_TOKENS = 50
_LEAST_SHIFT_ROLLOUTS = 4
_SHIFT_FACTOR = 0.5
_SHIFT_SHARE = 0.6
_LEAST_GAP = 0.01
# Hardly any rollout of six tokens or more fits the neighbouring token four times as well by chance.
_LEAST_CLEAR_SHIFTS, _CLEAR_SHIFT_SHARE = 2, 0.02
_LEAST_SCALE_TOKENS = 100
# The factor must be within 3 % of one of these, and explain 97 % of the sum of squares.
_BASES = {"log π is in base 2": 1 / math.log(2), "log π is in base 10": 1 / math.log(10)}
_SCALE_NEAR, _SCALE_FIT = 0.03, 0.97
# If the trainer does not apply the temperature, a factor moves at least half of the way from 1 to it (measured).
# A lag that softens or sharpens the policy moves it by a few per cent: temperatures within 0.15 of 1 are not checked.
_TOWARDS_TEMPERATURE, _LEAST_HEAT = 0.4, 0.15
# Temperatures of 0.4 to 0.7 against 1 give slopes of one sign, and R² of 0.36 to 0.9; a stale engine, dropout and
# quantisation give slopes of both signs.
_LEAST_SLOPE, _LEAST_FIT, _LEAST_BEST_FIT, _MEAN_NEAR = 0.05, 0.35, 0.55, 0.02
_OTHER = {"earlier": "t − 1", "later": "t + 1"}
NO_PAIRS = "needs rollout_log_probs and trainer_log_probs"


def check_log_base(evidence: LintEvidence) -> Outcome:
    """Check for two log bases: one column is a constant times the other."""
    check = "wrong_log_base"
    tokens = evidence.count("scale_tokens")
    if not evidence.count("paired"):
        return NotChecked(check, NO_PAIRS)
    if tokens < _LEAST_SCALE_TOKENS:
        return NotChecked(check, f"fewer than {_LEAST_SCALE_TOKENS} uncertain tokens")
    slopes, fits = [], []
    for part in ("likely", "unlikely"):
        cross, mu, pi = (evidence.sum(f"scale_{part}_{name}") for name in ("cross", "mu", "pi"))
        if mu > 0 and pi > 0:
            slopes.append(cross / mu)
            fits.append(cross * cross / (mu * pi))
    for text, base in _BASES.items():
        for meaning, factor in ((text, base), (text.replace("π", "μ"), 1.0 / base)):
            near = all(abs(slope / factor - 1.0) <= _SCALE_NEAR for slope in slopes)
            if slopes and near and min(fits) >= _SCALE_FIT:
                seen = (
                    f"log π is {format_number(slopes[0])} times log μ over {tokens:,} uncertain tokens, at likely and "
                    f"unlikely ones alike: {meaning}, and the other one in base e."
                )
                return Finding(check, "critical", seen, {"factor": slopes[0], "tokens": tokens})
    return Clean(check)


def check_trainer_temperature(evidence: LintEvidence) -> Outcome:
    """Check if the trainer divides its logits by the declared temperature of processed log-probs."""
    check = "temperature_of_trainer"
    rollouts, low = evidence.count("rollouts"), -evidence.extreme("minus_min_temperature")
    if not evidence.count("paired"):
        return NotChecked(check, NO_PAIRS)
    if not evidence.count("sampling_unknown") and not evidence.count("declared_tempered"):
        return Clean(check, "sampled at temperature 1, as declared")
    if evidence.count("sampling_unknown") or evidence.count("mode_processed") < rollouts:
        return NotChecked(check, "needs a declared temperature and logprobs_mode=processed_logprobs")
    if low <= 0 or low != evidence.extreme("max_temperature"):
        return NotChecked(check, "rollouts were sampled with several temperatures, or greedily")
    if abs(low - 1.0) < _LEAST_HEAT:
        why = f"temperature {format_number(low)} is too near to 1: a change of the policy has the same effect"
        return NotChecked(check, why)
    tokens = evidence.count("scale_tokens")
    mu = {part: evidence.sum(f"scale_{part}_mu") for part in ("likely", "unlikely")}
    if tokens < _LEAST_SCALE_TOKENS or not min(mu.values()) > 0:
        return NotChecked(check, f"fewer than {_LEAST_SCALE_TOKENS} uncertain tokens")
    slopes = {part: evidence.sum(f"scale_{part}_cross") / square for part, square in mu.items()}
    # At unlikely tokens log π tends to T·log μ; at likely ones it differs in the other direction.
    way = max((slopes["unlikely"] - 1.0) / (low - 1.0), (slopes["likely"] - 1.0) / (1.0 / low - 1.0))
    if way < _TOWARDS_TEMPERATURE:
        return Clean(check)
    mean, t = evidence.groups.mean_and_t("ratio_minus_one")
    if mean > _MEAN_NEAR and t > _MEAN_DEVIATIONS:
        # The same policy at another temperature has the same tokens, so that E ρ is 1.
        return Clean(check, f"mean ρ is {format_number(1.0 + mean)}, and 1 if only the temperature differs")
    seen = (
        f"log π is {format_number(slopes['likely'])} times log μ at likely tokens and "
        f"{format_number(slopes['unlikely'])} times at unlikely ones, sampled and logged at temperature "
        f"{format_number(low)}; both are 1 if the trainer divides its logits by it."
    )
    numbers = {"factor_at_likely": slopes["likely"], "factor_at_unlikely": slopes["unlikely"], "temperature": low}
    return Finding(check, "warning", seen, {**numbers, "tokens": tokens})


_MEAN_DEVIATIONS = 4.0


def check_temperatures(evidence: LintEvidence, model_kind: ModelKind | None = None) -> Outcome:
    """Check if log π looks like log μ at another temperature: d is nearly linear in both.

    Noise on one side gives slopes of different signs against log μ and log π, and a bad fit against one of them. Other
    policies can look the same, so the finding names only a possible cause.
    """
    check, tokens = "temperatures_differ", evidence.count("scale_tokens")
    if not evidence.count("paired"):
        return NotChecked(check, NO_PAIRS)
    if tokens < _LEAST_SCALE_TOKENS:
        return NotChecked(check, f"fewer than {_LEAST_SCALE_TOKENS} uncertain tokens")
    healthy = required_range("k3_kl", model_kind or "moe").warning
    assert healthy is not None
    k3 = evidence.sum("paired_k3") / evidence.count("paired")
    cross, of_mu, of_pi = (
        sum(evidence.sum(f"scale_{part}_{name}") for part in ("likely", "unlikely")) / tokens
        for name in ("cross", "mu", "pi")
    )
    mu, pi = evidence.sum("scale_mu") / tokens, evidence.sum("scale_pi") / tokens
    variances = of_mu - mu * mu, of_pi - pi * pi
    covariance = cross - mu * pi
    of_d = variances[0] + variances[1] - 2.0 * covariance
    if k3 <= healthy or min(*variances, of_d) <= 0:
        return Clean(check)
    slopes = covariance / variances[0] - 1.0, 1.0 - covariance / variances[1]
    fits = tuple(slope * slope * variance / of_d for slope, variance in zip(slopes, variances, strict=True))
    if (
        slopes[0] * slopes[1] <= 0
        or min(map(abs, slopes)) < _LEAST_SLOPE
        or min(fits) < _LEAST_FIT
        or max(fits) < _LEAST_BEST_FIT
    ):
        return Clean(check)
    ratio = math.sqrt(1.0 / ((1.0 + slopes[0]) / (1.0 - slopes[1])))
    mean = 1.0 + evidence.groups.mean_and_t("ratio_minus_one")[0]
    sampled = abs(mean - 1.0) < _MEAN_NEAR
    who = (
        "so the logged μ can have sampled the tokens, and π has another temperature"
        if sampled
        else "so the logged μ did not sample the tokens: it looks as if it were logged before the temperature"
    )
    seen = (
        f"d is mostly a straight line of log μ and of log π (R² {format_number(fits[0])} and {format_number(fits[1])})"
        f", as if π had {format_number(ratio)} times the temperature of μ; without that line k3 would be about "
        f"{format_number(0.5 * of_d * (1.0 - max(fits)))} and not {format_number(k3)}. Mean ρ is "
        f"{format_number(mean)}, {who}."
    )
    numbers = {"temperature_ratio": ratio, "fit_of_mu": fits[0], "fit_of_pi": fits[1], "mean_ratio": mean, "k3": k3}
    return Finding(check, "warning", seen, {**numbers, "tokens": tokens})


def check_shift(evidence: LintEvidence) -> Outcome:
    """Check for a log π that fits log μ of the neighbouring token."""
    check = "shifted_log_probs"
    tokens, rollouts = evidence.count("shift_tokens"), evidence.count("shift_rollouts")
    if not evidence.count("paired"):
        return NotChecked(check, NO_PAIRS)
    if tokens < _LEAST_SHIFT_TOKENS or rollouts < _LEAST_SHIFT_ROLLOUTS:
        return NotChecked(check, f"only {tokens} tokens in {rollouts} rollouts have a neighbour on both sides")
    own = evidence.sum("shift_none") / tokens
    gaps = {name: evidence.sum(f"shift_{name}") / tokens for name in ("earlier", "later")}
    best = min(gaps, key=lambda name: gaps[name])
    preferring = evidence.count(f"shift_prefer_{best}")
    if own < _LEAST_GAP or gaps[best] > _SHIFT_FACTOR * own or preferring < _SHIFT_SHARE * rollouts:
        return _partly_shifted(evidence)
    other = _OTHER[best]
    seen = (
        f"|log π − log μ| averages {format_number(own)} nats, and {format_number(gaps[best])} between log π of token t "
        f"and log μ of token {other}; the shift fits at least twice as well in {preferring:,} of {rollouts:,} rollouts."
    )
    numbers = {"mean_gap": own, "mean_gap_earlier": gaps["earlier"], "mean_gap_later": gaps["later"]}
    return Finding(check, "critical", seen, {**numbers, "rollouts_preferring": preferring, "rollouts": rollouts})


def _partly_shifted(evidence: LintEvidence) -> Outcome:
    """Check if only some rollouts are clearly shifted, for example those of one rank or one data source."""
    check, rollouts = "shifted_log_probs", evidence.count("shift_rollouts")
    clear = {name: evidence.count(f"shift_clear_{name}") for name in _OTHER}
    best = max(clear, key=lambda name: clear[name])
    if clear[best] < max(_LEAST_CLEAR_SHIFTS, _CLEAR_SHIFT_SHARE * rollouts):
        return Clean(check)
    seen = (
        f"In {clear[best]:,} of {rollouts:,} rollouts log π of token t fits log μ of token {_OTHER[best]} at least "
        "four times as well as log μ of token t; in the others it does not."
    )
    counts = {"rollouts_preferring": clear[best], "rollouts": rollouts}
    return Finding(check, "critical", seen, counts, title=title_of_part(check))
