"""Records of the lint, corrections, theory and exact divergences of a step. NaN means "not estimable"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BiasRecord",
    "CheckRecord",
    "CorrectionRecord",
    "CorrectionsRecord",
    "ExactRecord",
    "ExactStepRecord",
    "ExactTokenRecord",
    "ExactTokensRecord",
    "GradientRecord",
    "HorizonRecord",
    "LintExampleRecord",
    "LintRecord",
    "LintWarningRecord",
    "MeanRecord",
    "PinskerRecord",
    "PopulationRecord",
    "RunLintRecord",
    "RunWarningRecord",
    "SequenceChi2Record",
    "StepNoiseRecord",
    "TheoryRecord",
]


@dataclass(frozen=True, slots=True)
class LintExampleRecord:
    """One example of a warning; `token` is an index in the response, None: the whole rollout."""

    sample_id: str
    text: str
    token: int | None = None


@dataclass(frozen=True, slots=True)
class LintWarningRecord:
    """A named warning, "critical" (measures are wrong) or "warning" (they may mislead), with its evidence."""

    name: str
    severity: str
    title: str
    seen: str
    effect: str
    remedy: str
    evidence: Mapping[str, float]
    where: tuple[LintExampleRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """One check of the lint: "clean", "warned" or "not checked", and why."""

    name: str
    title: str
    state: str
    why: str


@dataclass(frozen=True, slots=True)
class LintRecord:
    """The verdict on the log-probs of a step; no warnings: it is clean."""

    step: int
    attempt: int
    shards: int
    rollouts: int
    tokens: int
    warnings: tuple[LintWarningRecord, ...]
    checks: tuple[CheckRecord, ...]


@dataclass(frozen=True, slots=True)
class RunWarningRecord:
    """A warning that one or more steps of a run have."""

    name: str
    severity: str
    title: str
    steps: int
    first_step: int
    newest_step: int


@dataclass(frozen=True, slots=True)
class RunLintRecord:
    """The warnings of the closed steps of a run, and those of several steps together."""

    checked_steps: int
    clean_steps: int
    warnings: tuple[RunWarningRecord, ...]
    window: tuple[LintWarningRecord, ...] = ()
    whole_run: LintWarningRecord | None = None
    whole_run_check: CheckRecord | None = None


@dataclass(frozen=True, slots=True)
class PopulationRecord:
    """Sequences, with the means of what was logged of them."""

    sequences: int
    reward_mean: float
    advantage_mean: float
    length_mean: float
    turns_mean: float
    lag_mean: float


@dataclass(frozen=True, slots=True)
class AffectedRecord:
    """The sequences that a threshold drops or truncates, and the others."""

    touched: PopulationRecord
    untouched: PopulationRecord
    groups: int
    groups_touched: float
    groups_emptied: float


@dataclass(frozen=True, slots=True)
class CorrectionRecord:
    """The effect of one correction at one threshold on a step; `not_estimable` says why figures are NaN.

    Fractions are of 1. `ess` is (Σw)²/(N Σw²), `distortion` is E|w − ρ| at the level of the correction.
    """

    correction: str
    title: str
    formula: str
    level: str
    effect: str
    source: str
    threshold: str | None
    threshold_used: str | None
    exact: bool
    kept_tokens: float
    kept_sequences: float
    touched_tokens: float
    weight_mean: float
    weight_variance: float
    ess: float
    distortion: float
    uncorrected_distortion: float
    token_distortion: float
    advantage_distortion: float
    affected: AffectedRecord
    not_estimable: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CorrectionsRecord:
    """The effects of corrections on a step, by correction and threshold. Nothing is applied."""

    comparison: str
    step: int
    attempt: int
    tokens: int
    rollouts: int
    items: tuple[CorrectionRecord, ...]


@dataclass(frozen=True, slots=True)
class BiasRecord:
    """The bound of the bias of the uncorrected gradient, per unit of B, with a bootstrap-t interval by prompt group."""

    per_unit: float
    low: float
    high: float
    trivial: float
    sequences: int
    mean_length: float
    longest: int
    largest_reward: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HorizonRecord:
    """The bound 2·Δmax·T²; `vacuous`: no better than the trivial one."""

    value: float
    trivial: float
    vacuous: bool
    delta_max: float
    not_estimable: str | None = None


@dataclass(frozen=True, slots=True)
class PinskerRecord:
    """The bound D_TV ≤ ½√χ² of the token mean, and the direct estimate of D_TV."""

    bound: float
    tv_token: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceChi2Record:
    """The extrapolation (1 + χ²)^T for independent tokens; `value` is NaN if too large for a float64."""

    value: float
    log10: float
    chi2_token: float
    length: float


@dataclass(frozen=True, slots=True)
class GradientRecord:
    """The variance of the gradient of one prompt, and what follows from it."""

    variance: float
    of_batch: float
    signal: float
    batch_prompts_for_parity: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepNoiseRecord:
    """The noise (η²/2)·[Var + ‖Bias‖²] of a step at η and at η/2."""

    at_learning_rate: float
    at_half: float
    bias_norm: float


@dataclass(frozen=True, slots=True)
class TheoryRecord:
    """Bounds on the bias of a step's gradient, and the cost of its noise."""

    comparison: str
    step: int
    attempt: int
    bias: BiasRecord
    horizon: HorizonRecord
    pinsker: PinskerRecord
    sequence_chi2: SequenceChi2Record | None = None
    gradient: GradientRecord | None = None
    gradient_missing: str | None = None
    learning_rate: float = float("nan")
    learning_rate_source: str | None = None
    step_noise: StepNoiseRecord | None = None
    step_noise_with_bias: StepNoiseRecord | None = None


@dataclass(frozen=True, slots=True)
class MeanRecord:
    """A token mean with its interval by prompt group."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ExactRecord:
    """The exact divergences of a pair at a step, in nats per token; π is the target, μ the behaviour.

    `kl` is KL(μ‖π), `reverse_kl` KL(π‖μ); `k3_kl` is the sampled estimate of `kl` from the same tokens.
    """

    pair: str
    name: str
    target: str
    behaviour: str
    from_sample: bool
    kl: MeanRecord
    reverse_kl: MeanRecord
    tv: MeanRecord
    top1_flip: MeanRecord
    target_entropy: MeanRecord
    behaviour_entropy: MeanRecord
    k3_kl: MeanRecord
    delta_max: float
    tokens: int
    rollouts: int
    groups: int
    effective_groups: float
    non_finite: int
    interval: str
    accelerator: str
    device_name: str
    published_at_us: int
    target_fingerprint: Mapping[str, Any]
    behaviour_fingerprint: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExactStepRecord:
    """The exact divergences of a step: the newest of each pair."""

    run: str
    step: int
    attempt: int
    items: tuple[ExactRecord, ...]


@dataclass(frozen=True, slots=True)
class ExactTokenRecord:
    """The divergences at the state before one response token."""

    sample_id: str
    position: int
    token_id: int
    kl: float
    reverse_kl: float
    tv: float
    top1_flip: bool
    target_entropy: float
    behaviour_entropy: float
    target_log_prob: float
    behaviour_log_prob: float


@dataclass(frozen=True, slots=True)
class ExactTokensRecord:
    """Response tokens of a step with the exact divergences at their states."""

    pair: str
    step: int
    attempt: int
    sample_id: str | None
    items: tuple[ExactTokenRecord, ...]
