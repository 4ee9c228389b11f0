"""Records of alert rules."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RuleRecord", "RulesRecord", "RulesVersionRecord", "RunRulesRecord"]


@dataclass(frozen=True, slots=True)
class RuleRecord:
    """A rule: what it reads, its thresholds and their source; docs/rules.md has the fields."""

    name: str
    key: str
    severity: str
    cause: str
    why: str
    what_to_do: str
    source: str
    absolute: float | None = None
    relative: float | None = None
    reference: str | None = None
    direction: str = ""
    ideal: float | None = None
    pooled: str | None = None
    minimum_duration: int | None = None
    cooldown_steps: int | None = None
    lag_zero_only: bool = False
    corroborates_surge: bool = False
    follows_learning: bool = False
    effect: str = ""


@dataclass(frozen=True, slots=True)
class RulesVersionRecord:
    """A change of a run's rules; `toml` is the file that was sent."""

    version: int
    effective_from_step: int
    toml: str
    made_at_us: int


@dataclass(frozen=True, slots=True)
class RulesRecord:
    """The default rules of a kind of model, also as TOML."""

    model_kind: str | None
    rules: tuple[RuleRecord, ...]
    toml: str


@dataclass(frozen=True, slots=True)
class RunRulesRecord:
    """The rules that hold for a run at a step, also as TOML, and all versions of its changes."""

    step: int
    model_kind: str | None
    rules: tuple[RuleRecord, ...]
    toml: str
    versions: tuple[RulesVersionRecord, ...] = ()
