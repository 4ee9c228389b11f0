"""Two scales: different log bases, a temperature that the trainer ignores, or two that seem to differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from foreshock.lint.checks.declared import Declared
from foreshock.lint.checks.pairs import Pairs, if_copied, if_invalid
from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.checks.shift import sample_of_rollouts
from foreshock.lint.counting import Counting, Counts, Table
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number

# In nats: a token above _LIKELY is likely; only log-probs between _LEAST_LOG_PROB and _BELOW_ZERO are used.
_LIKELY, _BELOW_ZERO, _LEAST_LOG_PROB = -1.0, -0.01, -100.0
_LEAST_TOKENS = 100
_TOO_FEW = NotChecked(f"fewer than {_LEAST_TOKENS} uncertain tokens")
# The factor must be within 3 % of one of these, and explain 97 % of the sum of squares.
_BASES = {"log π is in base 2": 1 / math.log(2), "log π is in base 10": 1 / math.log(10)}
_NEAR, _FIT = 0.03, 0.97
# If the trainer does not apply the temperature, a factor moves at least half of the way from 1 to it (measured).
# A lag that softens or sharpens the policy moves it by a few per cent: temperatures within 0.15 of 1 are not checked.
_TOWARDS_TEMPERATURE, _LEAST_HEAT = 0.4, 0.15
# Temperatures of 0.4 to 0.7 against 1 give slopes of one sign, and R² of 0.36 to 0.9; a stale engine, dropout and
# quantisation give slopes of both signs.
_LEAST_SLOPE, _LEAST_FIT, _LEAST_BEST_FIT, _MEAN_NEAR = 0.05, 0.35, 0.55, 0.02
_MEAN_DEVIATIONS = 4.0
# What the line leaves of half of the variance of d, as a share of k3: at most 0.24 of two temperatures from 0.4 to 1.2
# (softmax of 50 to 30,000 normal logits). A line that leaves more does not explain the mismatch.
_LARGEST_REST = 0.5


class Products(Table):
    """Sums of log μ, log π and their products over tokens. The key of likely ones, with log μ above −1, is 1."""

    COLUMNS = ("tokens", "mu", "pi", "cross", "mu_squared", "pi_squared")


@dataclass
class Scale(Counts):
    """A sample of the tokens with two log-probs clearly below 0. A factor shows at likely and at unlikely ones."""

    products: Products = field(default_factory=Products)

    def add_batch(self, counting: Counting) -> None:
        sample = sample_of_rollouts(counting.batch)
        if sample is None:
            return
        behaviour, target = sample.behaviour, sample.target
        uncertain = np.maximum(behaviour, target) < np.float32(_BELOW_ZERO)
        chosen = np.flatnonzero(uncertain & (np.minimum(behaviour, target) > _LEAST_LOG_PROB))
        mu, pi = behaviour[chosen].astype(np.float64), target[chosen].astype(np.float64)
        likely = mu > _LIKELY
        for key, part in enumerate((np.flatnonzero(~likely), np.flatnonzero(likely))):
            m, p = mu[part], pi[part]
            if m.size:
                products = (np.einsum("i,i", *pair) for pair in ((m, p), (m, m), (p, p)))
                self.products += Products(np.array([key], np.uint64), np.array([[m.size, m.sum(), p.sum(), *products]]))

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.products.column("tokens").sum())

    @property
    def slopes(self) -> list[float]:
        """Σ log μ · log π / Σ (log μ)² of unlikely and of likely tokens, as far as there are any."""
        return [float(each) for each in self.products.column("cross") / self.products.column("mu_squared")]


def _check_base(judging: Judging) -> Outcome:
    """Check for two log bases: one column is a constant times the other."""
    scale, tokens = judging[Scale], judging[Scale].tokens
    if tokens < _LEAST_TOKENS:
        return _TOO_FEW
    _, _, _, cross, mu, pi = scale.products.values.T
    slopes, fits = scale.slopes, cross * cross / (mu * pi)
    for text, base in _BASES.items():
        for meaning, factor in ((text, base), (text.replace("π", "μ"), 1.0 / base)):
            near = all(abs(slope / factor - 1.0) <= _NEAR for slope in slopes)
            if near and fits.min() >= _FIT:
                seen = (
                    f"log π is {format_number(slopes[-1])} times log μ over {tokens:,} uncertain tokens, at likely and "
                    f"unlikely ones alike: {meaning}, and the other one in base e."
                )
                return Finding("critical", seen, {"factor": slopes[-1], "tokens": tokens})
    return Clean()


def _check_trainer(judging: Judging) -> Outcome:
    """Check if the trainer divides its logits by the declared temperature of processed log-probs."""
    declared, scale = judging[Declared], judging[Scale]
    temperature = declared.lowest_temperature
    if not declared.sampling_unknown and not declared.tempered:
        return Clean("sampled at temperature 1, as declared")
    if declared.sampling_unknown or declared.mode_processed < judging[Rollouts].rollouts:
        return NotChecked("needs a declared temperature and logprobs_mode=processed_logprobs")
    if temperature <= 0 or temperature != declared.max_temperature:
        return NotChecked("rollouts were sampled with several temperatures, or greedily")
    if abs(temperature - 1.0) < _LEAST_HEAT:
        why = f"temperature {format_number(temperature)} is too near to 1: a change of the policy has the same effect"
        return NotChecked(why)
    if scale.tokens < _LEAST_TOKENS or len(scale.slopes) < 2:
        return _TOO_FEW
    unlikely, likely = scale.slopes
    # At unlikely tokens log π tends to T·log μ; at likely ones it differs in the other direction.
    way = max((unlikely - 1.0) / (temperature - 1.0), (likely - 1.0) / (1.0 / temperature - 1.0))
    if way < _TOWARDS_TEMPERATURE:
        return Clean()
    mean, t = judging[Pairs].by_group.mean_and_t("ratio_minus_one")
    if mean > _MEAN_NEAR and t > _MEAN_DEVIATIONS:
        # The same policy at another temperature has the same tokens, so that E ρ is 1.
        return Clean(f"mean ρ is {format_number(1.0 + mean)}, and 1 if only the temperature differs")
    seen = (
        f"log π is {format_number(likely)} times log μ at likely tokens and {format_number(unlikely)} times at "
        f"unlikely ones, sampled and logged at temperature {format_number(temperature)}; "
        "both are 1 if the trainer divides its logits by it."
    )
    numbers = {"factor_at_likely": likely, "factor_at_unlikely": unlikely, "temperature": temperature}
    return Finding("warning", seen, {**numbers, "tokens": scale.tokens})


def _check_differ(judging: Judging) -> Outcome:
    """Check for two temperatures of all tokens. Those of a part are told with the part."""
    place = judging.outcome("mismatch_by_place")
    numbers = place.evidence if isinstance(place, Finding) else {}
    of_part = any(f"{each}_from" in numbers for each in ("data_source", "engine", "turn"))
    if of_part and numbers["k3_elsewhere"] <= judging.healthy_k3:
        return NotChecked("the mismatch is in one part of the tokens, and healthy elsewhere")
    return two_temperatures(judging)


def two_temperatures(judging: Judging) -> Outcome:
    """Return a finding if log π looks like log μ at another temperature: d is nearly linear in both.

    Noise on one side gives slopes of different signs against log μ and log π, and a bad fit against one of them. Other
    policies can look the same, so the finding names only a possible cause.
    """
    scale, tokens, pairs = judging[Scale], judging[Scale].tokens, judging[Pairs]
    if tokens < _LEAST_TOKENS:
        return _TOO_FEW
    mu, pi, cross, of_mu, of_pi = (float(each) for each in scale.products.values.sum(axis=0)[1:] / tokens)
    variances = of_mu - mu * mu, of_pi - pi * pi
    covariance = cross - mu * pi
    of_d = variances[0] + variances[1] - 2.0 * covariance
    if pairs.mean_k3 <= judging.healthy_k3 or min(*variances, of_d) <= 0:
        return Clean()
    slopes = covariance / variances[0] - 1.0, 1.0 - covariance / variances[1]
    fits = tuple(slope * slope * variance / of_d for slope, variance in zip(slopes, variances, strict=True))
    if (
        slopes[0] * slopes[1] <= 0
        or min(map(abs, slopes)) < _LEAST_SLOPE
        or min(fits) < _LEAST_FIT
        or max(fits) < _LEAST_BEST_FIT
    ):
        return Clean()
    rest = 0.5 * of_d * (1.0 - max(fits))
    if rest > _LARGEST_REST * pairs.mean_k3:
        return Clean()
    ratio = math.sqrt(1.0 / ((1.0 + slopes[0]) / (1.0 - slopes[1])))
    mean = 1.0 + pairs.by_group.mean_and_t("ratio_minus_one")[0]
    who = "so the logged μ can have sampled the tokens, and π has another temperature"
    if mean <= 1.0 - _MEAN_NEAR:
        # The probability in π of the ids that are left. Another temperature alone makes no mean below 1.
        who = "as if μ were truncated too (top-p, top-k or min-p), and π were not"
    elif mean >= 1.0 + _MEAN_NEAR:
        who = "so the logged μ did not sample the tokens: it looks as if it were logged before the temperature"
    seen = (
        f"d is mostly a straight line of log μ and of log π (R² {format_number(fits[0])} and {format_number(fits[1])})"
        f", as if π had {format_number(ratio)} times the temperature of μ; without that line k3 would be about "
        f"{format_number(rest)} and not {format_number(pairs.mean_k3)}. Mean ρ is "
        f"{format_number(mean)}, {who}."
    )
    numbers = {"temperature_ratio": ratio, "fit_of_mu": fits[0], "fit_of_pi": fits[1], "mean_ratio": mean}
    return Finding("warning", seen, {**numbers, "k3": pairs.mean_k3, "tokens": tokens})


LOG_BASE = Check(
    "wrong_log_base",
    "one of the two log-probs is not a natural logarithm",
    "Every measure is meaningless: d grows with how unlikely a token is.",
    "Multiply log2 values by ln 2 = 0.693, log10 values by ln 10 = 2.303.",
    _check_base,
    unless=if_copied,
)
OF_TRAINER = Check(
    "temperature_of_trainer",
    "the trainer does not apply the sampling temperature",
    "d is the difference between two temperatures: k3 and every weight measure that, and not the mismatch.",
    "Divide the trainer's logits by the sampling temperature before the log-softmax.",
    _check_trainer,
    unless=if_invalid,
    proven=False,
)
DIFFER = Check(
    "temperatures_differ",
    "it looks as if the two log-probs had different temperatures",
    "d is mostly the difference between two temperatures, and so are k3 and every weight.",
    "Declare the engine's temperature, top_p and logprobs_mode (batch attributes) and log its entropy, so that the "
    "lint can tell. Compare with the temperature that the trainer divides its logits by.",
    _check_differ,
    unless=if_invalid,
    yields_to=("temperature_of_trainer", "penalty_of_engine"),  # truncation alone makes no such line
    proven=False,
)
