"""Schemas of the lint. The same documents are stored for a step and shown on pages."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from foreshock.lint import CheckResult, Example, LintReport, LintWarning
from foreshock_service.runs.coverage.schemas import CoverageRead
from foreshock_service.runs.shard_schemas import AnswerOfStep

Severity = Literal["critical", "warning"]


class ExampleRead(BaseModel):
    """One example of a warning."""

    sample_id: str
    token: int | None = Field(description="index in the response, from 0; null: the whole rollout")
    text: str

    @classmethod
    def of(cls, example: Example) -> Self:
        """Convert the library's example."""
        return cls(sample_id=example.sample_id, token=example.token if example.token >= 0 else None, text=example.text)


class WarningRead(BaseModel):
    """Named warning with its evidence."""

    name: str
    severity: Severity = Field(description="`critical`: measures are wrong; `warning`: they may mislead")
    title: str
    seen: str
    evidence: dict[str, float]
    where: list[ExampleRead]
    effect: str = Field(description="effect on the measures")
    remedy: str = Field(description="recommended action")

    @classmethod
    def of(cls, warning: LintWarning) -> Self:
        """Convert the library's warning."""
        return cls(
            name=warning.name,
            severity=warning.severity,
            title=warning.title,
            seen=warning.seen,
            evidence=dict(warning.evidence),
            where=[ExampleRead.of(example) for example in warning.where],
            effect=warning.effect,
            remedy=warning.remedy,
        )


class CheckRead(BaseModel):
    """One check: its state (made or not) and its result."""

    name: str
    title: str
    state: Literal["clean", "warned", "not checked"]
    why: str

    @classmethod
    def of(cls, check: CheckResult) -> Self:
        """Convert the library's check."""
        return cls(name=check.name, title=check.title, state=check.state, why=check.why)


class StepLintRead(AnswerOfStep):
    """Verdict on a step, over all of its shards with stored evidence."""

    step: int
    attempt: int
    shards: int = Field(description="number of checked shards")
    rollouts: int
    tokens: int = Field(description="model-generated tokens")
    warnings: list[WarningRead] = Field(description="critical ones first; empty if the step is clean")
    checks: list[CheckRead]
    coverage: CoverageRead | None = Field(default=None, description="the rollouts that were checked")

    @classmethod
    def of(cls, step: int, attempt: int, shards: int, report: LintReport) -> Self:
        """Convert the library's report."""
        return cls(
            step=step,
            attempt=attempt,
            shards=shards,
            rollouts=report.rollouts,
            tokens=report.tokens,
            warnings=[WarningRead.of(warning) for warning in report.warnings],
            checks=[CheckRead.of(check) for check in report.checks],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document to store."""
        return self.model_dump(mode="json")


class RunWarningRead(BaseModel):
    """Warning that one or more steps of the run have."""

    name: str
    severity: Severity
    title: str
    steps: int = Field(description="number of steps with this warning")
    first_step: int
    newest_step: int


class RunLintRead(BaseModel):
    """Lint of a run: the warnings of its closed steps, and the test over all steps together."""

    checked_steps: int
    clean_steps: int
    warnings: list[RunWarningRead] = Field(description="critical ones first, then by their newest step")
    whole_run: WarningRead | None = Field(
        description="warning of the surprisal test over all steps together, if no single step has it"
    )
    window: list[WarningRead] = Field(
        description="findings of the newest ten steps together that none of them has alone; needs at most 256 shards"
    )
    whole_run_check: CheckRead | None = Field(description="result of that test; null if no step was checked")
