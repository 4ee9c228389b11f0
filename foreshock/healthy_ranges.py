"""The one table of healthy ranges, by kind of model. Alerts, pages, commands, dashboards and documents read it.

Ranges hold for token means at lag 0, whatever the GPU. They are references: a value outside of one raises an alert, and
never lowers a learning rate by itself.

The ranges of one mismatch agree: those of |d|, |Δp| and exp|d| are derived from that of k3. A Gaussian d of twice the
k3 at an end of its range is at their end, so that a mismatch inside the range of k3 is inside all of them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

from foreshock.model_kind import MODEL_KIND_NAMES, MODEL_KINDS, UNDECLARED_NOTE, ModelKind, judged_as

Verdict = Literal["healthy", "warning", "critical", "unknown"]

_ORDER: tuple[Verdict, ...] = ("unknown", "healthy", "warning", "critical")


@dataclass(frozen=True, slots=True)
class HealthyRange:
    """A measure's healthy range and the thresholds beyond which its value is a warning or critical.

    `measure` is the column of a measure in the registry. `direction` tells on which side of a threshold a value is
    beyond it. A threshold is None if none is known. `model_kind` is None if the range holds for every kind of model.
    """

    measure: str
    label: str
    healthy: str
    warning: float | None
    critical: float | None
    source: str
    direction: Literal["above", "below"] = "above"
    model_kind: ModelKind | None = None

    def verdict(self, value: float) -> Verdict:
        """Return the verdict on a value; "unknown" for NaN. ±inf is beyond every threshold on its side."""
        if math.isnan(value):
            return "unknown"
        if self._is_beyond(value, self.critical):
            return "critical"
        return "warning" if self._is_beyond(value, self.warning) else "healthy"

    def _is_beyond(self, value: float, threshold: float | None) -> bool:
        if threshold is None:
            return False
        return value > threshold if self.direction == "above" else value < threshold

    @property
    def text(self) -> str:
        """The healthy range and the most severe threshold, such as "1e-5 to 1e-3, critical > 1e-2"."""
        if self.critical is None:
            return f"{self.healthy}, warning {self.threshold_text(self.warning)}"
        return f"{self.healthy}, critical {self.threshold_text(self.critical)}"

    def threshold_text(self, threshold: float | None) -> str:
        """Return a threshold as text, such as "> 1e-3"; empty if there is none."""
        if threshold is None:
            return ""
        return f"{'>' if self.direction == 'above' else '<'} {threshold_number(threshold)}"


_PSIS = "Vehtari et al. 2024 (PSIS): above 0.5 the variance of ρ is infinite, above 0.7 its mean cannot be trusted"
_PER_ENTROPY = (
    "a choice of this project: k3 of 1e-3 at an entropy of 0.03 nats; 520 healthy steps of recorded dense runs had at "
    "most 1.2e-2, in the median 3e-4. Mixtures of experts: one decade above, as for k3"
)

_K3: Final = (
    HealthyRange(
        "k3_kl", "k3 per token", "1e-5 to 1e-3", 1e-3, 1e-2, "published for dense bfloat16 models",
        model_kind="dense",
    ),
    HealthyRange(
        "k3_kl", "k3 per token", "1e-3 to 0.01", 1e-2, 1e-1,
        "published for mixtures of experts in bfloat16: one decade above dense models", model_kind="moe",
    ),
)  # fmt: skip


LARGEST_OF_NUMERICS: Final = 0.1
"""The largest k3 that quantised weights made in the recorded and the public cases; dropout can make more."""


def _of_same_mismatch(k3: HealthyRange) -> tuple[HealthyRange, ...]:
    """Return the ranges of |d|, |Δp| and exp|d| that agree with a range of k3.

    A Gaussian d has k3 = σ² / 2, E|d| = σ √(2/π) and E exp|d| = 2 exp(σ²/2) Φ(σ); heavier tails have a smaller E|d| at
    the same k3. |Δp| is at most |d|.
    """
    assert k3.warning is not None
    assert k3.critical is not None
    sigma, far = (math.sqrt(2.0 * 2.0 * end) for end in (k3.warning, k3.critical))
    difference = round(sigma * math.sqrt(2.0 / math.pi), 2)
    factor, far_factor = (round(2.0 * math.exp(each**2 / 2.0) * NormalDist().cdf(each), 2) for each in (sigma, far))
    source = f"a Gaussian d of twice the largest healthy k3, {k3.warning:g}"
    kind = k3.model_kind
    return (
        HealthyRange("mean_abs_d", "mean |d|", f"to {difference}", difference, None, source, model_kind=kind),
        HealthyRange(
            "rollout_probs_diff_mean", "mean |Δp|", f"to {difference}", difference, None,
            f"that of the difference of log-probs, which is never smaller: {source}", model_kind=kind,
        ),
        HealthyRange(
            "token_mult_prob_error", "E[exp |d|]", f"to {factor}", factor, far_factor,
            f"{source}; NeMo-RL calls more than 1.05 suspicious", model_kind=kind,
        ),
    )  # fmt: skip


RANGES: Final[tuple[HealthyRange, ...]] = (
    *_K3,
    HealthyRange(
        "k3_kl_per_entropy", "k3 / entropy", "to 3e-2", 3e-2, 3e-1, _PER_ENTROPY, model_kind="dense",
    ),
    HealthyRange(
        "k3_kl_per_entropy", "k3 / entropy", "to 0.3", 3e-1, 3.0, _PER_ENTROPY, model_kind="moe",
    ),
    *(each for k3 in _K3 for each in _of_same_mismatch(k3)),
    HealthyRange("tail_2", "F(2)", "below 0.01", 0.01, 0.1, "R3: above 0.1 is dangerous"),
    HealthyRange(
        "ess_token", "ESS of token weights", "near 1", None, 0.3,
        "the usual alarm; on unclamped weights (clamped at 2, ESS cannot fall below 0.64)", direction="below",
    ),
    HealthyRange("pareto_k", "k̂ of ρ, if ρ reaches e", "to 0.5", 0.5, 0.7, _PSIS),
    HealthyRange("pareto_k_inverse", "k̂ of 1/ρ, if 1/ρ reaches e", "to 0.5", 0.5, 0.7, _PSIS),
    HealthyRange(
        "truncated_fraction", "responses cut at the cap", "to 0.35", 0.5, None,
        "a choice of this project; a benign run had 0.1 to 0.35",
    ),
)  # fmt: skip

_BY_KIND: dict[ModelKind, dict[str, HealthyRange]] = {
    kind: {each.measure: each for each in RANGES if each.model_kind in (None, kind)} for kind in MODEL_KINDS
}


def range_of(measure: str, model_kind: ModelKind | None) -> HealthyRange | None:
    """Return the range of a measure for a kind of model (None: dense); None if the measure has no range."""
    return _BY_KIND[judged_as(model_kind)].get(measure)


def required_range(measure: str, model_kind: ModelKind | None = None) -> HealthyRange:
    """Return the range of a measure that has one. Raises KeyError for a measure without a range."""
    return _BY_KIND[judged_as(model_kind)][measure]


def ranges_note(measure: str, model_kind: ModelKind | None) -> str:
    """Return sentences for a caption: whose range applies, its thresholds, and what to do if the kind is unknown."""
    known, kind = required_range(measure, model_kind), MODEL_KIND_NAMES[judged_as(model_kind)]
    thresholds = f"warning {known.threshold_text(known.warning)}, critical {known.threshold_text(known.critical)}"
    note = f"Ranges of a {kind} at lag 0: {thresholds}."
    return f"{note} {UNDECLARED_NOTE}" if model_kind is None else note


def verdict_of(measure: str, value: float, model_kind: ModelKind | None) -> Verdict:
    """Return the verdict on a measure's value; "unknown" for a measure without a range and for NaN."""
    known = range_of(measure, model_kind)
    return "unknown" if known is None else known.verdict(value)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict; "unknown" if there is none."""
    return max(verdicts, key=_ORDER.index, default="unknown")


def threshold_number(value: float) -> str:
    """Return a threshold or a rate as a person writes it: "1e-3", "5e-7"; other values as decimals."""
    if value <= 0:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    digits = f"{value / 10.0**exponent:g}"
    return f"{digits}e{exponent}" if exponent < -4 or (exponent < -2 and digits == "1") else f"{value:g}"
