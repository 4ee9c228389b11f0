"""What replays found: attributions, exact divergences, weights searches, the configuration matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshock.api.probes import JobStateName
from foreshock.api.records import NAN, Measured, Record, described
from foreshock.interval_names import INTERVAL, RANGE, RANGE_NOTE
from foreshock.json_values import number_or_nan

__all__ = [
    "AttributionRecord",
    "ExactMeasuresRecord",
    "ExactRecord",
    "ExactStepRecord",
    "ExactTokenRecord",
    "ExactTokensRecord",
    "LinkRecord",
    "MatrixCellRecord",
    "MatrixPairRecord",
    "MatrixRecord",
    "MeanRecord",
    "MismatchRecord",
    "NoiseFloorRecord",
    "WeightsReplayRecord",
    "WeightsSearchRecord",
    "attribution_record",
    "weights_search_record",
]

_INTERVALS = {"description": f"what the intervals are: `{INTERVAL}`, or `{RANGE}`. {RANGE_NOTE}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRecord(Record):
    """A token mean with its bootstrap-t interval by prompt group; null if it cannot be estimated."""

    mean: Measured
    low: Measured
    high: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMeasuresRecord(Record):
    """Token means over the whole vocabulary at the states before model-generated tokens, μ the behaviour, π the target.

    The intervals show how the means vary with prompts and rollouts: the states were sampled. The sampling noise of the
    single token, which `k3_kl` has, is not in them.
    """

    kl: MeanRecord = field(metadata=described("KL(μ‖π), in nats per token"))
    reverse_kl: MeanRecord = field(metadata=described("KL(π‖μ), in nats per token"))
    tv: MeanRecord = field(metadata=described("total variation ½ Σ|π − μ|, 0 to 1"))
    delta_max: Measured = field(metadata=described("Δmax: the largest total variation at a visited state"))
    top1_flip: MeanRecord = field(metadata=described("share of states whose likeliest tokens differ"))
    target_entropy: MeanRecord = field(metadata=described("H(π), in nats"))
    behaviour_entropy: MeanRecord = field(metadata=described("H(μ), in nats"))
    k3_kl: MeanRecord = field(metadata=described("the sampled estimate of `kl` from the log-probs of the same tokens"))
    tokens: int = field(metadata=described("states that the means are over"))
    rollouts: int = field(metadata=described("rollouts with such a state"))
    groups: int = field(metadata=described("prompt groups of these rollouts"))
    effective_groups: Measured = field(metadata=described("effective number of groups of `kl`: (Σ S_g)²/Σ S_g²"))
    non_finite: int = field(metadata=described("states left out because a value of them is NaN or infinite"))
    interval: str = field(default=RANGE, metadata=_INTERVALS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRecord(ExactMeasuresRecord):
    """The exact divergences of a pair at a step, with the fingerprints of both scorers."""

    pair: str
    """the comparison `target/behaviour`, of the same weights"""
    name: str
    target: str
    behaviour: str
    from_sample: bool
    """the probe left some of the step's rollouts out"""
    target_fingerprint: Mapping[str, Any]
    behaviour_fingerprint: Mapping[str, Any]
    accelerator: str
    device_name: str
    published_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactStepRecord(Record):
    """The exact divergences of a step: the newest of each pair."""

    run: str
    step: int
    attempt: int
    items: tuple[ExactRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactTokenRecord(Record):
    """The divergences at the state before one response token; null if they are not finite."""

    sample_id: str
    position: int
    """index in the response, from 0"""
    token_id: int
    kl: Measured
    reverse_kl: Measured
    tv: Measured
    top1_flip: bool
    target_entropy: Measured
    behaviour_entropy: Measured
    target_log_prob: Measured
    behaviour_log_prob: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactTokensRecord(Record):
    """Response tokens of a step with the exact divergences at their states."""

    pair: str
    step: int
    attempt: int
    sample_id: str | None
    items: tuple[ExactTokenRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchRecord(Record):
    """The mismatch of two configurations over the same tokens; null if it cannot be estimated."""

    comparison: str
    """`target/behaviour`, names of scorers"""
    k3_kl: Measured
    """in nats per token"""
    low: Measured
    """bootstrap-t interval of k3 by prompt group"""
    high: Measured
    interval_name: str
    mean_abs_d: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCellRecord(Record):
    """A scorer with options on some hardware: its state, its mismatch and its cost."""

    probe: str
    scorer: str
    options: Mapping[str, Any]
    changed: Mapping[str, Any]
    """the options that differ from the scorer's first and plainest cell"""
    hardware: str
    """where it was scored; before that, where it was asked to be"""
    state: JobStateName
    reason: str | None
    """why there is no result, such as what the engine or hardware cannot do"""
    against_reference: MismatchRecord | None
    """null: no result, no reference, or the reference itself"""
    seconds_per_token: Measured
    """time of one pass per response token, without engine start and loading"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPairRecord(Record):
    """A configuration of the trainer against one of the engine on the same hardware, by their probes."""

    trainer: str
    engine: str
    mismatch: MismatchRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRecord(Record):
    """The cells of a step over one set of rollouts, oldest first."""

    run: str
    attempt: int
    step: int
    rollouts: int
    tokens: int
    reference: str | None
    """the probe of the reference; null: not scored yet"""
    cells: tuple[MatrixCellRecord, ...]
    pairs: tuple[MatrixPairRecord, ...] = ()
    recommendations: tuple[str, ...] = ()
    other_cells: int = 0
    """cells over other rollouts or weights, which are left out"""


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """One link of a chain; see `foreshock.measures.estimators.attribution.Link`."""

    name: str
    cause: str
    k3_kl: float
    mean_d: float
    rms_d: float
    max_abs_d: float
    share: float
    share_low: float
    share_high: float


@dataclass(frozen=True, slots=True)
class NoiseFloorRecord:
    """The difference of a scorer from itself in other batches."""

    scorer: str
    k3_kl: float
    max_abs_d: float


@dataclass(frozen=True, slots=True)
class WeightsReplayRecord:
    """A replay of a weights search: its weights in words, k3 in nats per token with its interval, or why it is missing.

    See `foreshock.weights_search.WeightsReplay`.
    """

    weights: str
    announced: bool
    k3_kl: float
    k3_low: float
    k3_high: float
    max_abs_d: float
    at_noise_floor: bool
    skipped: str
    step: int | None = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class WeightsSearchRecord:
    """The weights search of a step; replays whose k3 is at most `bound` are at the noise floor.

    `floor_k3` is k3 of the scorer against itself in other batches, `confirmed_k3` that of the best other weights in an
    engine that was started with them. `tied`: head and embeddings of the model are one tensor.
    """

    scorer: str
    bound: float
    ended: str
    replays: tuple[WeightsReplayRecord, ...]
    step: int | None = None
    attempt: int | None = None
    rollouts: int = 0
    tokens: int = 0
    floor_k3: float = NAN
    confirmed_k3: float = NAN
    tied: bool = False


@dataclass(frozen=True, slots=True)
class AttributionRecord:
    """The chain of one step; see `foreshock.measures.estimators.attribution.Attribution`.

    `conclusions` are the service's sentences, the headline first. `exact` has KL(μ‖π) over the whole vocabulary, in
    nats per token, of the links that it was computed for with the settings of their scores.
    """

    step: int
    chain: tuple[str, ...]
    missing: tuple[str, ...]
    links: tuple[LinkRecord, ...]
    whole: LinkRecord
    cancellation: float
    telescoping_error: float
    tokens: int
    rollouts: int
    reference: str | None
    reference_links: tuple[LinkRecord, ...]
    floors: tuple[NoiseFloorRecord, ...]
    conclusions: tuple[str, ...] = ()
    weights_search: WeightsSearchRecord | None = None
    stale: bool = False
    interval: str = RANGE
    method: str | None = None
    exact: Mapping[str, float] = field(default_factory=dict)


def attribution_record(step: int, value: Mapping[str, Any]) -> AttributionRecord:
    """Parse the attribution of a step."""
    side = value.get("side_branch") or {}
    return AttributionRecord(
        step=step,
        chain=tuple(value["chain"]),
        missing=tuple(value.get("missing") or ()),
        links=tuple(_link(link) for link in value["links"]),
        whole=_link(value["whole"]),
        cancellation=number_or_nan(value.get("cancellation")),
        telescoping_error=number_or_nan(value.get("telescoping_error")),
        tokens=int(value["tokens"]),
        rollouts=int(value["rollouts"]),
        reference=side.get("reference"),
        reference_links=tuple(_link(link) for link in side.get("links") or ()),
        floors=tuple(
            NoiseFloorRecord(
                str(floor["scorer"]), number_or_nan(floor.get("k3_kl")), number_or_nan(floor.get("max_abs_d"))
            )
            for floor in value.get("floors") or ()
        ),
        conclusions=tuple(str(conclusion["sentence"]) for conclusion in value.get("conclusions") or ()),
        weights_search=_weights_search(value.get("weights_search")),
        stale=bool(value.get("stale")),
        interval=str(value.get("interval") or RANGE),
        method=value.get("method"),
        exact={
            str(each["pair"]): number_or_nan(each["kl"]["mean"])
            for each in value.get("exact") or ()
            if not each.get("other_settings")
        },
    )


def _link(value: Mapping[str, Any]) -> LinkRecord:
    low, high = value.get("share_interval") or (value.get("share_low"), value.get("share_high"))
    numbers = {name: number_or_nan(value.get(name)) for name in ("k3_kl", "mean_d", "rms_d", "max_abs_d", "share")}
    return LinkRecord(
        name=str(value["name"]),
        cause=str(value.get("cause", "")),
        share_low=number_or_nan(low),
        share_high=number_or_nan(high),
        **numbers,
    )


def _weights_search(value: Any) -> WeightsSearchRecord | None:
    return None if value is None else weights_search_record(value)


def weights_search_record(value: Mapping[str, Any]) -> WeightsSearchRecord:
    """Parse a weights search."""
    return WeightsSearchRecord(
        scorer=str(value["scorer"]),
        bound=number_or_nan(value.get("bound")),
        ended=str(value.get("ended") or ""),
        replays=tuple(map(_replay, value["replays"])),
        step=value.get("step"),
        attempt=value.get("attempt"),
        rollouts=int(value.get("rollouts") or 0),
        tokens=int(value.get("tokens") or 0),
        floor_k3=number_or_nan(value.get("floor_k3")),
        confirmed_k3=number_or_nan(value.get("confirmed_k3")),
        tied=bool(value.get("tied")),
    )


def _replay(value: Mapping[str, Any]) -> WeightsReplayRecord:
    return WeightsReplayRecord(
        weights=str(value["weights"]),
        announced=bool(value.get("announced")),
        k3_kl=number_or_nan(value.get("k3_kl")),
        k3_low=number_or_nan(value.get("k3_low")),
        k3_high=number_or_nan(value.get("k3_high")),
        max_abs_d=number_or_nan(value.get("max_abs_d")),
        at_noise_floor=bool(value.get("at_noise_floor")),
        skipped=str(value.get("skipped") or ""),
        step=value.get("step"),
        part=str(value.get("part") or ""),
    )
