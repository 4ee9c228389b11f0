"""Answers about one step: lint, corrections, theory, buckets."""

from collections.abc import Mapping
from typing import Annotated, Literal

from foreshock.api.records import NAN, Measured, Record
from foreshock.api.runs import Coverage, OfStep
from foreshock.interval_names import RANGE, RANGE_NOTE

LintSeverity = Literal["critical", "warning", "info"]
CheckState = Literal["clean", "warned", "not checked"]


class LintExampleRecord(Record):
    """One example of a warning."""

    sample_id: str
    token: Annotated[int | None, "index in the response, from 0; null: the whole rollout"] = None
    text: str

    def __str__(self) -> str:
        place = self.sample_id if self.token is None else f"{self.sample_id}, token {self.token}"
        return f"{place}: {self.text}" if self.text else place


class LintWarningRecord(Record):
    """Named warning with its evidence."""

    name: str
    severity: Annotated[LintSeverity, "`critical`: measures are wrong; `warning`: they may mislead; `info`: neither"]
    title: str
    seen: str
    evidence: Mapping[str, float]
    where: tuple[LintExampleRecord, ...] = ()
    effect: Annotated[str, "effect on the measures"]
    remedy: Annotated[str, "recommended action"]


class CheckRecord(Record):
    """One check: its state (made or not) and its result."""

    name: str
    title: str
    state: CheckState
    why: str


class LintRecord(OfStep):
    """Verdict on a step, over all of its shards with stored evidence."""

    step: int
    attempt: int
    shards: Annotated[int, "number of checked shards"]
    rollouts: int
    tokens: Annotated[int, "model-generated tokens"]
    warnings: Annotated[tuple[LintWarningRecord, ...], "critical ones first; empty if the step is clean"]
    checks: tuple[CheckRecord, ...]
    coverage: Annotated[Coverage | None, "the rollouts that were checked"] = None


class RunWarningRecord(Record):
    """A warning of one or more steps of the run."""

    name: str
    severity: LintSeverity
    title: str
    steps: Annotated[int, "number of steps with this warning"]
    first_step: int
    newest_step: int


class RunLintRecord(Record):
    """Lint of a run: the warnings of its closed steps, and the test over all steps together."""

    checked_steps: int
    clean_steps: int
    warnings: Annotated[tuple[RunWarningRecord, ...], "critical ones first, then by their newest step"]
    whole_run: Annotated[LintWarningRecord | None, "of the surprisal test over all steps, if no single one has it"] = (
        None
    )
    window: Annotated[
        tuple[LintWarningRecord, ...], "of the newest ten steps together, and of none alone; up to 256 shards"
    ] = ()
    whole_run_check: Annotated[CheckRecord | None, "result of that test; null if no step was checked"] = None


class PopulationRecord(Record):
    """Population of sequences, with the means of their logged values."""

    sequences: int
    reward_mean: Measured
    advantage_mean: Measured
    length_mean: Annotated[Measured, "model-generated tokens"]
    turns_mean: Measured
    lag_mean: Annotated[Measured, "weights versions"]


class AffectedRecord(Record):
    """Sequences that would be dropped or truncated, and the others."""

    touched: Annotated[PopulationRecord, "sequences that the threshold affects; at token level, in at least one token"]
    untouched: PopulationRecord
    groups: Annotated[int, "prompt groups of two or more sequences"]
    groups_touched: Annotated[Measured, "fraction of groups with at least one touched sequence"]
    groups_emptied: Annotated[Measured, "fraction of groups in which every sequence is touched"]


class CorrectionRecord(Record):
    """Effect of one correction at one threshold; null if not estimable."""

    correction: str
    title: str
    formula: Annotated[str, "formula of the weight w"]
    level: Annotated[Literal["token", "sequence"], "unit that w applies to and that means are taken over"]
    effect: Annotated[Literal["none", "truncated", "dropped"], "effect beyond the threshold"]
    source: str
    threshold: Annotated[str | None, "requested threshold, completed: `2`, or `lower_upper`"]
    threshold_used: Annotated[str | None, "threshold of these figures: the nearest one with stored counts"]
    exact: Annotated[bool, "true if threshold and threshold_used are equal"]
    kept_tokens: Annotated[Measured, "fraction"]
    kept_sequences: Annotated[Measured, "fraction; a sequence is kept if none of its tokens is dropped"]
    touched_tokens: Annotated[Measured, "fraction whose weight the threshold changes"]
    weight_mean: Annotated[Measured, "E w"]
    weight_variance: Annotated[Measured, "a dropped token or sequence counts as 0"]
    ess: Annotated[Measured, "(Σw)²/(N Σw²), a fraction of all, unclamped"]
    distortion: Annotated[Measured, "E|w − ρ| at the correction's level"]
    uncorrected_distortion: Annotated[Measured, "E|1 − ρ| at the same level"]
    token_distortion: Annotated[Measured, "E|w − ρ| over tokens; null for weights of whole sequences"]
    advantage_distortion: Annotated[Measured, "E[(w − ρ)·A]"]
    affected: AffectedRecord
    not_estimable: Annotated[str | None, "reason why the figures are not available"] = None
    notes: tuple[str, ...] = ()


class CorrectionsRecord(OfStep):
    """Effects of corrections on a step, by correction and threshold. Nothing is applied."""

    comparison: str
    step: int
    attempt: int
    tokens: Annotated[int, "model-generated tokens with two finite log-probs"]
    rollouts: Annotated[int, "rollouts of the step, including those without such a token"]
    coverage: Coverage
    items: tuple[CorrectionRecord, ...]


class BiasRecord(Record):
    """Bound ‖bias of the uncorrected gradient‖ ≤ B·E_μ[|ρ_seq − 1|·T·|R|], for B = 1."""

    per_unit: Annotated[Measured, "per unit of B; null if no rollout has a reward"]
    low: Annotated[Measured, f"lower end of the bootstrap-t interval by prompt group: a {RANGE}. {RANGE_NOTE}"]
    high: Annotated[Measured, "upper end of the interval"]
    trivial: Annotated[Measured, "2·T·max|R| for the mean length T: upper bound for any two policies"]
    sequences: Annotated[int, "number of sequences with a reward"]
    mean_length: Annotated[Measured, "measured tokens"]
    longest: Annotated[int, "measured tokens"]
    largest_reward: Annotated[Measured, "max|R|"]
    notes: tuple[str, ...] = ()


class HorizonRecord(Record):
    """Horizon bound 2·Δmax·T², for B = 1 and |R| ≤ 1, T the longest sequence: with exact Δmax only."""

    value: Measured
    trivial: Annotated[float, "2·T"]
    vacuous: Annotated[bool, "Δmax·T ≥ 1: no better than the trivial bound"]
    delta_max: Measured
    not_estimable: str | None = None


class PinskerRecord(Record):
    """Bound D_TV ≤ ½√χ², of the token mean of χ²(π‖μ); valid if μ is the sampling distribution and covers π."""

    bound: Measured
    tv_token: Annotated[Measured, "direct estimate of D_TV, which does not require that μ covers π"]
    notes: Annotated[tuple[str, ...], "reason, if the estimate exceeds the bound"] = ()


class SequenceChi2Record(Record):
    """Extrapolation (1 + χ²)^T of E ρ_seq², for independent tokens that all have the mean χ². Not a bound."""

    value: Annotated[Measured, "null if too large for a float64; then use log10"]
    log10: Measured
    chi2_token: Measured
    length: Annotated[float, "mean length in tokens"]
    kind: str = "independent-token extrapolation"


class GradientRecord(Record):
    """Variance V̂ = (‖g_b‖² − ‖g_B‖²)/(1/b − 1/B); estimates may be negative by chance and are not clamped."""

    variance: Annotated[Measured, "variance of the gradient of one prompt"]
    of_batch: Annotated[Measured, "V̂/B"]
    signal: Annotated[Measured, "‖E g‖²"]
    batch_prompts_for_parity: Annotated[Measured, "V̂/signal, the simple noise scale"]
    notes: tuple[str, ...] = ()


class StepNoiseRecord(Record):
    """Noise (η²/2)·[Var + ‖Bias‖²] of the SGA lemma, for L = 1: halving η quarters it."""

    at_learning_rate: Annotated[Measured, "at η"]
    at_half: Annotated[Measured, "at η/2"]
    bias_norm: Annotated[Measured, "‖Bias‖ in the sum; 0: variance only"]


class Theory(Record):
    """Values of the papers' bounds; null if a needed value was not logged."""

    bias: BiasRecord
    horizon: HorizonRecord
    pinsker: PinskerRecord
    sequence_chi2: SequenceChi2Record | None = None
    gradient: GradientRecord | None = None
    step_noise: StepNoiseRecord | None = None
    step_noise_with_bias: Annotated[
        StepNoiseRecord | None, "if `gradient_bound` is given and the bias is estimable"
    ] = None


class TheoryRecord(Theory, OfStep):
    """Values of the papers' bounds at this step."""

    comparison: str
    step: int
    attempt: int
    coverage: Coverage
    gradient_missing: Annotated[str | None, "reason why gradient noise is not available"] = None
    learning_rate: Annotated[Measured, "η"] = NAN
    learning_rate_source: str | None = None


class BucketColumns(Record):
    """Columns with one entry per bucket; null if the bucket has no tokens."""

    tokens: tuple[int, ...]
    mean_abs_d: tuple[Measured, ...]
    mean_d: tuple[Measured, ...]
    k3_kl: tuple[Measured, ...]
    max_abs_d: tuple[Measured, ...]
    mean_abs_probability_difference: tuple[Measured, ...]


class BucketsRecord(OfStep):
    """Tokens in buckets: bucket i holds edges[i] ≤ value < edges[i + 1], the first all below and the last all above."""

    by: Annotated[str, "condition that defines the buckets"]
    meaning: str
    unit: str
    edges: Annotated[tuple[Measured, ...], "bucket edges; null: unbounded end"]
    coverage: Coverage
    columns: BucketColumns


class TokenIdColumns(Record):
    """Columns with one entry per token id, largest Σ k3 first."""

    token_id: tuple[int, ...]
    tokens: tuple[int, ...]
    mean_abs_d: tuple[Measured, ...]
    mean_d: tuple[Measured, ...]
    k3_kl: tuple[Measured, ...]
    k3_sum: Annotated[tuple[Measured, ...], "Σ k3 of the id's tokens"]
    k3_sum_missing: Annotated[tuple[Measured, ...], "upper bound of the part of Σ k3 that was omitted; null: no bound"]


class TokenIdsRecord(OfStep):
    """Tokens by id. Each shard keeps the ids with the largest Σ k3; the omitted part is bounded."""

    by: Literal["token_id"] = "token_id"
    meaning: str = "the token's id in the vocabulary"
    unit: str = "1"
    coverage: Coverage
    k3_sum_unnamed: Annotated[Measured, "upper bound of Σ k3 of an id that is not listed; null: no bound"]
    columns: TokenIdColumns


class TokenRecord(Record):
    """Response token with each scorer's log-prob; null if it is missing or not finite."""

    sample_id: str
    shard: int
    position: Annotated[int, "index in the response, from 0"]
    token_id: int
    generated: Annotated[bool, "true: sampled by the model; false: tool output, excluded from all measures"]
    d: Annotated[Measured, "log target − log behaviour"]
    log_probs: Mapping[str, Measured]


class TokensRecord(OfStep):
    """Tokens of one step: the worst by |d|, or one rollout in order."""

    comparison: str
    step: int
    attempt: int
    sample_id: str | None = None
    prompt_token_ids: Annotated[tuple[int, ...] | None, "prompt of the requested rollout"] = None
    scorers: tuple[str, ...]
    coverage: Annotated[Coverage, "the rollouts in full: of the others no token is stored"]
    items: tuple[TokenRecord, ...]
