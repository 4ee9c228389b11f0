"""What the surge detector reads of a step, remembers, and reports: plain data with a JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

SurgeKind = Literal["surge", "early_surge", "surge_again", "growth_with_reward", "ramp"]

Watching = Literal["warming", "no_lengths", "at_cap", "watching", "growing_with_reward", "surged"]


@dataclass(frozen=True, slots=True)
class StepLengths:
    """What a step tells about lengths: the mean length in tokens, its longest response, the fraction cut at the cap,
    the mean reward. None or not finite: not measured."""

    mean: float | None
    longest: float | None = None
    truncated: float | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Crossing:
    """An unconfirmed crossing of twice the baseline.

    ``baseline`` (of ``baseline_values`` values) and ``threshold`` are log lengths, ``before`` the values that the noise
    is estimated from, ``rising`` the steps and values of the growth window up to now, ``since`` the values from the
    crossing on, ``reward`` the median reward of the baseline.
    """

    step: int
    baseline: float
    baseline_values: int
    threshold: float
    before: tuple[float, ...]
    rising_steps: tuple[int, ...]
    rising: tuple[float, ...]
    since: tuple[float, ...]
    rewards_before: tuple[float, ...]
    rewards_since: tuple[float, ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Crossing:
        fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class SurgeDetection:
    """A detection at ``step``; lengths in tokens, ``noise`` in log units per step.

    If ``effective``, the schedule counts from ``surge_step``. ``onset`` is the most likely first step of the rise, with
    its interval; ``log_evidence`` the log of the e-detector, and ``confidence`` what it leaves of a false alarm.
    """

    kind: SurgeKind
    step: int
    surge_step: int
    length: float
    baseline: float
    noise: float
    autocorrelation: float
    effective: bool
    onset: int
    onset_first: int
    onset_last: int
    log_evidence: float
    confidence: float
    truncated: float | None = None
    reward_change: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SurgeDetection:
        return cls(**value)


@dataclass(frozen=True, slots=True)
class SurgeState:
    """The state of the detector; plain data, all lengths as natural logs. ``rewards`` are those of ``steps``.

    Nothing in it counts or sums over the whole run: after a late step it soon equals the state without it.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    rewards: tuple[float | None, ...] = ()
    high_water: float | None = None
    anchor: float | None = None
    anchor_step: int = 0
    anchor_reward: float | None = None
    crossing: Crossing | None = None
    last_confirmed_step: int | None = None
    pending: SurgeDetection | None = None
    effective_surge_step: int | None = None
    cap: float | None = None
    capped: int = 0
    missing: int = 0
    armed_since: int | None = None

    def to_json(self) -> dict[str, Any]:
        value = {name: getattr(self, name) for name in self.__slots__}
        return value | {
            "steps": list(self.steps),
            "values": list(self.values),
            "rewards": list(self.rewards),
            "crossing": self.crossing and _lists(asdict(self.crossing)),
            "pending": self.pending and self.pending.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SurgeState:
        crossing, pending = value["crossing"], value["pending"]
        fields = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
        return cls(
            **fields
            | {
                "crossing": crossing and Crossing.from_json(crossing),
                "pending": pending and SurgeDetection.from_json(pending),
            }
        )


def _lists(value: dict[str, Any]) -> dict[str, Any]:
    return {name: list(each) if isinstance(each, tuple) else each for name, each in value.items()}
