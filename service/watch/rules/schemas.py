"""Schemas of rules."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from foreshock.diagnosis.rule_files import LARGEST_TEXT
from foreshock.model_kind import ModelKind
from foreshock.severity import Severity


class RuleRead(BaseModel):
    """A rule: what it reads, its thresholds and their source."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    key: str = Field(description="comparison:measure, or scalars:name")
    severity: Severity
    cause: str = Field(description="rules that fire for one cause are one episode")
    why: str
    what_to_do: str
    source: str = Field(description="where the threshold comes from")
    absolute: float | None
    relative: float | None = Field(description="factor on the run's own baseline, or on `reference`")
    reference: str | None
    direction: str
    ideal: float
    pooled: str | None = Field(description="null: steps in a row count; else evidence is pooled over steps")
    minimum_duration: int
    cooldown_steps: int
    lag_zero_only: bool
    corroborates_surge: bool
    follows_learning: bool = Field(description="values beyond the threshold enter the baseline while the reward rises")
    effect: str


class RulesRead(BaseModel):
    """The default rules of a kind of model, also as TOML."""

    model_kind: ModelKind | None
    rules: list[RuleRead]
    toml: str


class RulesVersionRead(BaseModel):
    """A change of a run's rules; `toml` is what was sent."""

    model_config = ConfigDict(from_attributes=True)

    version: int
    effective_from_step: int
    toml: str
    made_at_us: int


class RunRulesRead(RulesRead):
    """The rules that hold at a step, and all versions."""

    step: int
    versions: list[RulesVersionRead]


class RulesPut(BaseModel):
    """A file of rules."""

    model_config = ConfigDict(extra="forbid")

    toml: str = Field(max_length=LARGEST_TEXT, description="changes of the default rules; see docs/early-warning.md")
