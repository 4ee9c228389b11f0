"""Check pairs of log-probs: equal numbers, a mean ratio off 1, a shift by one token, two bases, one temperature."""

from __future__ import annotations

import math

from foreshock.lint.checks.outcomes import FALSE_ALARM, LEAST_GROUPS, Clean, Finding, NotChecked, Outcome
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.formatting import format_number, format_percent
from foreshock.lint.report import Severity
from foreshock.measures.estimators.intervals import student_t_quantile

__all__ = ["check_identical", "check_log_base", "check_mean_ratio", "check_shift", "check_trainer_temperature"]

_LEAST_UNCERTAIN = 20
# Published mismatches move mean ρ by less than 0.1 %; the worst mixture of experts by about 1 %.
_LEAST_RATIO_ERROR = 0.02
_LEAST_CERTAIN = 20
_CERTAIN_SHARE = 0.01
_ONE_SIDED = 0.2
_LEAST_SHIFT_TOKENS = 50
_LEAST_SHIFT_ROLLOUTS = 4
_SHIFT_FACTOR = 0.5
_SHIFT_SHARE = 0.6
_LEAST_GAP = 0.01

# By chance hardly any rollout of six tokens or more fits its neighbour four times as well.
_LEAST_CLEAR_SHIFTS, _CLEAR_SHIFT_SHARE = 2, 0.02
_LEAST_COPIED_ROLLOUTS, _COPIED_SHARE = 2, 0.05
# If truncation is declared, this much missing mass is enough: it biases k3 as much as a mismatch does.
_LEAST_CUT = 0.002
_LEAST_SCALE_TOKENS = 100
# The factor has to be within 3 % of one of these, and to explain 97 % of the squares.
_BASES = {"log π is in base 2": 1 / math.log(2), "log π is in base 10": 1 / math.log(10)}
_SCALE_NEAR, _SCALE_FIT = 0.03, 0.97
# If the trainer does not apply the temperature, a factor moves from 1 towards it by 0.5 or more of the way (measured).
# A lag that softens or sharpens the policy moves it by a few per cent: temperatures within 0.15 of 1 are not checked.
_TOWARDS_TEMPERATURE, _LEAST_HEAT = 0.4, 0.15

_OTHER = {"earlier": "t − 1", "later": "t + 1"}
_NO_PAIRS = "needs rollout_log_probs and trainer_log_probs"


def check_identical(evidence: LintEvidence) -> Outcome:
    """Check for a log π that equals log μ in every bit."""
    check = "identical_log_probs"
    paired, uncertain = evidence.count("paired"), evidence.count("uncertain")
    if not paired:
        return NotChecked(check, _NO_PAIRS)
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
    return Finding(check, "warning", seen, {"copied_rollouts": copied, "rollouts": copiable})


def check_log_base(evidence: LintEvidence) -> Outcome:
    """Check for logarithms of two bases: one column is the other one times a constant."""
    check = "wrong_log_base"
    tokens = evidence.count("scale_tokens")
    if not evidence.count("paired"):
        return NotChecked(check, _NO_PAIRS)
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
        return NotChecked(check, _NO_PAIRS)
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
    seen = (
        f"log π is {format_number(slopes['likely'])} times log μ at likely tokens and "
        f"{format_number(slopes['unlikely'])} times at unlikely ones, sampled and logged at temperature "
        f"{format_number(low)}; both are 1 if the trainer divides its logits by it."
    )
    numbers = {"factor_at_likely": slopes["likely"], "factor_at_unlikely": slopes["unlikely"], "temperature": low}
    return Finding(check, "warning", seen, {**numbers, "tokens": tokens})


def check_mean_ratio(evidence: LintEvidence) -> tuple[Outcome, Outcome]:
    """Check for processed log-probs, and for a mean ρ off 1 for any other reason."""
    processed, other = "processed_log_probs", "mean_ratio"
    paired = evidence.count("paired")
    if not paired:
        return NotChecked(processed, _NO_PAIRS), NotChecked(other, _NO_PAIRS)
    mean, t = evidence.groups.mean_and_t("ratio_minus_one")
    groups = int((evidence.groups.tokens > 0).sum())
    tested = groups >= LEAST_GROUPS and math.isfinite(mean) and not math.isnan(t)
    cut = evidence.count("processed_and_truncated")
    significant = tested and abs(t) >= student_t_quantile(1 - FALSE_ALARM / 2, groups - 1)
    off = significant and abs(mean) >= _LEAST_RATIO_ERROR
    certain = evidence.count("certain_behaviour")
    above, below = evidence.count("above_zero"), evidence.count("below_zero")
    many_certain = certain >= _LEAST_CERTAIN and certain >= _CERTAIN_SHARE * paired
    one_sided = below >= _LEAST_CERTAIN and above <= _ONE_SIDED * below
    numbers = {"mean_ratio": 1.0 + mean, "t": t, "groups": groups, "certain_under_mu_only": certain}
    numbers |= {"d_above_0.01": above, "d_below_minus_0.01": below}
    mean_text = f"Mean ρ is {format_number(1.0 + mean)}{_interval(mean, t, groups)}"
    too_few = NotChecked(other, f"the error of mean ρ needs {LEAST_GROUPS} prompt groups, and there are {groups}")
    if many_certain or (off and mean < 0 and one_sided) or (cut and significant and mean <= -_LEAST_CUT):
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


def check_shift(evidence: LintEvidence) -> Outcome:
    """Check for a log π that fits log μ of the neighbouring token."""
    check = "shifted_log_probs"
    tokens, rollouts = evidence.count("shift_tokens"), evidence.count("shift_rollouts")
    if not evidence.count("paired"):
        return NotChecked(check, _NO_PAIRS)
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
    """Check for clearly shifted rollouts beside others that are not, as of one rank or one data source."""
    check, rollouts = "shifted_log_probs", evidence.count("shift_rollouts")
    clear = {name: evidence.count(f"shift_clear_{name}") for name in _OTHER}
    best = max(clear, key=lambda name: clear[name])
    if clear[best] < max(_LEAST_CLEAR_SHIFTS, _CLEAR_SHIFT_SHARE * rollouts):
        return Clean(check)
    seen = (
        f"In {clear[best]:,} of {rollouts:,} rollouts log π of token t fits log μ of token {_OTHER[best]} at least "
        "four times as well as log μ of token t; in the others it does not."
    )
    return Finding(check, "critical", seen, {"rollouts_preferring": clear[best], "rollouts": rollouts})


def _interval(mean: float, t: float, groups: int) -> str:
    """Return the interval of mean ρ by Student's t, clustered by prompt group, as text."""
    if groups < 2 or not math.isfinite(t) or t == 0.0:
        return ""
    reach = student_t_quantile(0.975, groups - 1) * abs(mean / t)
    low, high = format_number(1.0 + mean - reach), format_number(1.0 + mean + reach)
    return f" (Student's t: {low} to {high} over {groups:,} prompt groups)"
