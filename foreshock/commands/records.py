"""Records of the service's answers, as plain dataclasses. NaN means "not estimable", which is null in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshock.conclusions.health import HealthVerdict
from foreshock.interval_names import RANGE
from foreshock.json_values import number_or_nan
from foreshock.learning_rate.advice import Advice
from foreshock.learning_rate.applied import Applied
from foreshock.model_kind import ModelKind, known_model_kind

__all__ = [
    "AdviceRecord",
    "AlertRecord",
    "AttributionRecord",
    "Bucket",
    "Curve",
    "HealthRecord",
    "LinkRecord",
    "NoiseFloorRecord",
    "PooledRecord",
    "RunRecord",
    "alert_record",
    "attribution_record",
    "health_record",
    "run_record",
]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run."""

    id: str
    key: str
    project: str
    state: str
    name: str | None = None
    model: str | None = None
    trainer: str | None = None
    engine: str | None = None
    hardware: str | None = None
    initial_learning_rate: float | None = None
    length_cap: int | None = None
    model_kind: ModelKind | None = None
    advice_mode: str | None = None
    last_step: int | None = None
    created_at_us: int | None = None
    updated_at_us: int | None = None

    @property
    def title(self) -> str:
        """The run's name, else the client's key."""
        return self.name or self.key


@dataclass(frozen=True, slots=True)
class Curve:
    """Measures of one comparison over the active steps; `values` has one number per step."""

    comparison: str
    steps: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]
    incomplete: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Steps that closed without some shards: (stored, expected) of each."""
    coverage: Mapping[int, str] = field(default_factory=dict)
    """Steps of which shards were sent as statistics: what the measures of each rest on."""

    def of(self, measure: str) -> tuple[float, ...]:
        """Return one number per step; all NaN if the service does not know the measure."""
        return self.values.get(measure, (math.nan,) * len(self.steps))

    def known(self, measure: str) -> bool:
        """Return True if any step has a finite value of the measure."""
        return any(math.isfinite(value) for value in self.of(measure))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tokens whose probability under the behaviour score is in [low, high)."""

    low: float
    high: float
    tokens: int
    mean_abs_d: float
    mean_d: float
    k3_kl: float
    max_abs_d: float
    mean_abs_probability_difference: float


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


@dataclass(frozen=True, slots=True)
class WeightsSearchRecord:
    """The weights search of a step; replays whose k3 is at most `bound` are at the noise floor."""

    scorer: str
    bound: float
    ended: str
    replays: tuple[WeightsReplayRecord, ...]


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


@dataclass(frozen=True, slots=True)
class PooledRecord:
    """A measure pooled over the newest steps; see `foreshock.conclusions.health`."""

    measure: str
    mean: float
    low: float
    high: float
    verdict: HealthVerdict
    interval: str = RANGE


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """The verdict on a run's newest measured steps, with the service's sentences, the headline first."""

    verdict: HealthVerdict = "unknown"
    sentences: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    measures: tuple[PooledRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class AlertRecord:
    """An alert in any state."""

    id: str
    rule: str
    step: int
    severity: str
    state: str
    value: float
    threshold: float
    why: str
    what_to_do: str


@dataclass(frozen=True, slots=True)
class AdviceRecord:
    """The learning-rate advice, the next step at which the service lowers the rate, and what the trainer applied."""

    advice: Advice
    advised_scale: float
    next_decay_step: int | None
    applied: Applied | None = None


def run_record(value: Mapping[str, Any]) -> RunRecord:
    """Parse a run."""
    known: dict[str, Any] = {name: value.get(name) for name in RunRecord.__slots__}
    return RunRecord(**{**known, "model_kind": known_model_kind(known["model_kind"])})


def health_record(value: Mapping[str, Any]) -> HealthRecord:
    """Parse the health of a run."""
    return HealthRecord(
        verdict=value["verdict"],
        sentences=tuple(map(str, value["sentences"])),
        first_step=value["first_step"],
        last_step=value["last_step"],
        measures=tuple(
            PooledRecord(
                measure=str(each["measure"]),
                mean=number_or_nan(each["mean"]),
                low=number_or_nan(each["low"]),
                high=number_or_nan(each["high"]),
                verdict=each["verdict"],
                interval=str(each.get("interval") or RANGE),
            )
            for each in value["measures"]
        ),
    )


def alert_record(value: Mapping[str, Any]) -> AlertRecord:
    """Parse an alert."""
    return AlertRecord(
        id=str(value.get("id", "")),
        rule=str(value.get("rule", "")),
        step=int(value.get("step") or 0),
        severity=str(value.get("severity", "info")),
        state=str(value.get("state", "open")),
        value=number_or_nan(value.get("value")),
        threshold=number_or_nan(value.get("threshold")),
        why=str(value.get("why", "")),
        what_to_do=str(value.get("what_to_do", "")),
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


def _weights_search(value: Any) -> WeightsSearchRecord | None:
    if value is None:
        return None
    return WeightsSearchRecord(
        scorer=str(value["scorer"]),
        bound=number_or_nan(value.get("bound")),
        ended=str(value.get("ended") or ""),
        replays=tuple(
            WeightsReplayRecord(
                weights=str(each["weights"]),
                announced=bool(each.get("announced")),
                k3_kl=number_or_nan(each.get("k3_kl")),
                k3_low=number_or_nan(each.get("k3_low")),
                k3_high=number_or_nan(each.get("k3_high")),
                max_abs_d=number_or_nan(each.get("max_abs_d")),
                at_noise_floor=bool(each.get("at_noise_floor")),
                skipped=str(each.get("skipped") or ""),
            )
            for each in value["replays"]
        ),
    )
