"""Records of attributions and weights searches. NaN means "not estimable", which is null in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshock.interval_names import RANGE
from foreshock.json_values import number_or_nan

__all__ = [
    "AttributionRecord",
    "LinkRecord",
    "NoiseFloorRecord",
    "WeightsReplayRecord",
    "WeightsSearchRecord",
    "attribution_record",
    "weights_search_record",
]


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
    floor_k3: float = math.nan
    confirmed_k3: float = math.nan
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
