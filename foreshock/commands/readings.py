"""What commands read from the service, as plain records. NaN stands for "not estimable", which is null in JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from foreshock.client.connection import ServiceConnection
from foreshock.errors import Rejected, RunNotFound
from foreshock.learning_rate.advice import Advice

__all__ = [
    "AdviceReading",
    "AlertReading",
    "AttributionReading",
    "Bucket",
    "Curve",
    "LinkReading",
    "Readings",
    "RunReading",
    "find_run",
    "list_runs",
]

_PAGE = 200


@dataclass(frozen=True, slots=True)
class RunReading:
    """A run as the service describes it."""

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
    advice_mode: str | None = None
    last_step: int | None = None
    created_at_us: int | None = None
    updated_at_us: int | None = None

    @property
    def title(self) -> str:
        """Its name, else the client's key."""
        return self.name or self.key


@dataclass(frozen=True, slots=True)
class Curve:
    """Measures of one comparison over the surviving steps; `values` has one number per step."""

    comparison: str
    steps: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]

    def of(self, measure: str) -> tuple[float, ...]:
        """One number per step; NaN everywhere where the service does not know the measure."""
        return self.values.get(measure, (math.nan,) * len(self.steps))

    def known(self, measure: str) -> bool:
        """Whether any step has a finite value of the measure."""
        return any(math.isfinite(value) for value in self.of(measure))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tokens whose probability under the behaviour score lies in [low, high)."""

    low: float
    high: float
    tokens: int
    mean_abs_d: float
    mean_d: float
    k3_kl: float
    max_abs_d: float
    mean_abs_probability_difference: float


@dataclass(frozen=True, slots=True)
class LinkReading:
    """A link of the chain; see `foreshock.measures.estimators.attribution.Link`."""

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
class FloorReading:
    """What a scorer gives against itself in other batches."""

    scorer: str
    k3_kl: float
    max_abs_d: float


@dataclass(frozen=True, slots=True)
class AttributionReading:
    """The chain of one step; see `foreshock.measures.estimators.attribution.Attribution`."""

    step: int
    chain: tuple[str, ...]
    missing: tuple[str, ...]
    links: tuple[LinkReading, ...]
    whole: LinkReading
    cancellation: float
    telescoping_error: float
    tokens: int
    rollouts: int
    reference: str | None
    reference_links: tuple[LinkReading, ...]
    nearer: str | None
    floors: tuple[FloorReading, ...]


@dataclass(frozen=True, slots=True)
class AlertReading:
    """An alert, in whatever state."""

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
class AdviceReading:
    """The learning-rate advice, and the service's own word on when the rate falls next."""

    advice: Advice
    advised_scale: float
    next_decay_step: int | None


def list_runs(connection: ServiceConnection, project: str | None = None) -> Iterator[RunReading]:
    """All runs that the key may see, newest first as the service lists them. Raises ServiceError."""
    cursor: str | None = None
    while True:
        page = connection.get_json("/v1/runs", {"limit": _PAGE, "cursor": cursor, "project": project})
        for item in page["items"]:
            yield _run(item)
        cursor = page.get("next_cursor")
        if cursor is None:
            return


def find_run(connection: ServiceConnection, wanted: str | None) -> RunReading:
    """The run with that id, or else that client key or name; None: the newest. Raises ServiceError."""
    if wanted is not None:
        try:
            return _run(connection.get_json(f"/v1/runs/{wanted}"))
        except Rejected as error:
            if error.status not in (httpx.codes.NOT_FOUND, httpx.codes.UNPROCESSABLE_ENTITY):
                raise
    for run in list_runs(connection):
        if wanted is None or wanted in (run.key, run.name):
            return run
    what = "no run yet" if wanted is None else f"no run with the id, key or name {wanted!r}"
    raise RunNotFound(f"{connection.url} has {what}; list them with `foreshock runs`", status=httpx.codes.NOT_FOUND)


class Readings:
    """Readings of one run. All methods raise ServiceError; None says that there is nothing (yet)."""

    def __init__(self, connection: ServiceConnection, run: str) -> None:
        self._connection = connection
        self._path = f"/v1/runs/{run}"

    def curve(self, comparison: str, measures: Sequence[str], *, from_step: int = 0) -> Curve:
        """The measures of a comparison from a step on; those that a service of another release knows."""
        try:
            columns = self._columns(comparison, measures, from_step)
        except Rejected as error:
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY:
                raise
            there = {item["column"] for item in self._connection.get_json("/v1/measures")["items"]}
            if there >= set(measures):
                raise
            columns = self._columns(comparison, [measure for measure in measures if measure in there], from_step)
        values = {name: tuple(map(_number, columns[name])) for name in measures if name in columns}
        return Curve(comparison, tuple(columns["step"]), values)

    def _columns(self, comparison: str, measures: Sequence[str], from_step: int) -> Any:
        query: list[tuple[str, str | int | float | None]] = [("comparison", comparison), ("from_step", from_step)]
        query += [("measure", measure) for measure in measures]
        return self._connection.get_json(f"{self._path}/measurements", query)["columns"]

    def buckets(self, step: int, comparison: str) -> tuple[Bucket, ...] | str:
        """The buckets of a step that hold tokens; a sentence where another release measured them."""
        try:
            answer = self._optional(f"{self._path}/steps/{step}/buckets", {"comparison": comparison})
        except Rejected as error:
            if error.status != httpx.codes.CONFLICT:
                raise
            return f"{error}."
        if answer is None:
            return ()
        edges, columns = answer["edges"], answer["columns"]
        measures = Bucket.__slots__[3:]
        buckets = (
            Bucket(low, high, int(columns["tokens"][index]), *(_number(columns[name][index]) for name in measures))
            for index, (low, high) in enumerate(itertools.pairwise(edges))
        )
        return tuple(bucket for bucket in buckets if bucket.tokens)

    def attribution(self, step: int) -> AttributionReading | None:
        """The chain of a step, None where it was not probed."""
        answer = self._optional(f"{self._path}/steps/{step}/attribution", {})
        return None if answer is None else _attribution(step, answer)

    def probed_steps(self) -> tuple[int, ...]:
        """The steps of which a probe is done, at least in part."""
        states = self._probes()
        return tuple(sorted({int(probe["step"]) for probe in states if _any_done(probe)}))

    def unfinished_probes(self) -> tuple[tuple[int, str, str], ...]:
        """Step, state and reason of each probe that has not come to a result."""
        return tuple(
            (int(probe["step"]), str(probe["state"]), str(probe.get("reason") or ""))
            for probe in self._probes()
            if probe["state"] != "done"
        )

    def alerts(self) -> tuple[AlertReading, ...]:
        """All alerts, by step."""
        items = self._items(f"{self._path}/alerts")
        return tuple(sorted((_alert(item) for item in items), key=lambda alert: (alert.step, alert.rule)))

    def advice(self) -> AdviceReading | None:
        """The learning-rate advice."""
        answer = self._optional(f"{self._path}/lr-advice", {})
        if answer is None:
            return None
        advice = Advice.from_json(answer)
        advised = answer.get("advised_scale", answer.get("scale"))
        return AdviceReading(advice, _number(advised), answer.get("next_decay_step"))

    def _probes(self) -> list[dict[str, Any]]:
        return self._items(f"{self._path}/probes")

    def _items(self, path: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = self._connection.get_json(path, {"cursor": cursor})
            items += page["items"]
            cursor = page.get("next_cursor")
            if cursor is None:
                return items

    def _optional(self, path: str, query: Mapping[str, str]) -> Any:
        try:
            return self._connection.get_json(path, query)
        except Rejected as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise


def _run(value: Mapping[str, Any]) -> RunReading:
    known: dict[str, Any] = {name: value.get(name) for name in RunReading.__slots__}
    return RunReading(**known)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _alert(value: Mapping[str, Any]) -> AlertReading:
    return AlertReading(
        id=str(value.get("id", "")),
        rule=str(value.get("rule", "")),
        step=int(value.get("step") or 0),
        severity=str(value.get("severity", "info")),
        state=str(value.get("state", "open")),
        value=_number(value.get("value")),
        threshold=_number(value.get("threshold")),
        why=str(value.get("why", "")),
        what_to_do=str(value.get("what_to_do", "")),
    )


def _link(value: Mapping[str, Any]) -> LinkReading:
    low, high = value.get("share_interval") or (value.get("share_low"), value.get("share_high"))
    numbers = {name: _number(value.get(name)) for name in ("k3_kl", "mean_d", "rms_d", "max_abs_d", "share")}
    return LinkReading(
        name=str(value["name"]), cause=str(value.get("cause", "")), share_low=_number(low), share_high=_number(high),
        **numbers,
    )  # fmt: skip


def _attribution(step: int, value: Mapping[str, Any]) -> AttributionReading:
    side = value.get("side_branch") or {}
    return AttributionReading(
        step=step,
        chain=tuple(value["chain"]),
        missing=tuple(value.get("missing") or ()),
        links=tuple(_link(link) for link in value["links"]),
        whole=_link(value["whole"]),
        cancellation=_number(value.get("cancellation")),
        telescoping_error=_number(value.get("telescoping_error")),
        tokens=int(value["tokens"]),
        rollouts=int(value["rollouts"]),
        reference=side.get("reference"),
        reference_links=tuple(_link(link) for link in side.get("links") or ()),
        nearer=side.get("nearer"),
        floors=tuple(
            FloorReading(str(floor["scorer"]), _number(floor.get("k3_kl")), _number(floor.get("max_abs_d")))
            for floor in value.get("floors") or ()
        ),
    )


def _any_done(probe: Mapping[str, Any]) -> bool:
    return probe["state"] == "done" or any(job.get("state") == "done" for job in probe.get("jobs") or ())
