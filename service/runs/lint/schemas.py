"""What the lint looks like over HTTP; the same documents are what is stored of a step and shown on pages."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from foreshock.lint import CheckResult, Example, LintReport, LintWarning

Severity = Literal["critical", "warning"]


class ExampleRead(BaseModel):
    """One place where a warning was seen."""

    sample_id: str
    token: int | None = Field(description="its place in the response, from 0; null: the rollout as a whole")
    text: str

    @classmethod
    def of(cls, example: Example) -> Self:
        """The example as it is shown."""
        return cls(sample_id=example.sample_id, token=example.token if example.token >= 0 else None, text=example.text)


class WarningRead(BaseModel):
    """A named warning with its evidence."""

    name: str
    severity: Severity = Field(description="`critical`: measures are wrong; `warning`: they may mislead")
    title: str
    seen: str
    evidence: dict[str, float]
    where: list[ExampleRead]
    effect: str = Field(description="what it does to the measures")
    remedy: str = Field(description="what to do")

    @classmethod
    def of(cls, warning: LintWarning) -> Self:
        """The warning as it is shown."""
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
    """One check: whether it was made, and whether it warned."""

    name: str
    title: str
    state: Literal["clean", "warned", "not checked"]
    why: str

    @classmethod
    def of(cls, check: CheckResult) -> Self:
        """The check as it is shown."""
        return cls(name=check.name, title=check.title, state=check.state, why=check.why)


class StepLintRead(BaseModel):
    """The verdict on a step: over all of its shards whose evidence is there."""

    step: int
    attempt: int
    shards: int = Field(description="shards that were looked at")
    rollouts: int
    tokens: int = Field(description="model-generated tokens")
    warnings: list[WarningRead] = Field(description="critical ones first; empty where the step is clean")
    checks: list[CheckRead]

    @classmethod
    def of(cls, step: int, attempt: int, shards: int, report: LintReport) -> Self:
        """The report as it is shown."""
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
        """What is stored."""
        return self.model_dump(mode="json")


class RunWarningRead(BaseModel):
    """A warning that steps of the run have in common."""

    name: str
    severity: Severity
    title: str
    steps: int = Field(description="how many steps have it")
    first_step: int
    newest_step: int


class RunLintRead(BaseModel):
    """The lint of a run: which warnings its closed steps have, and what only all steps together show."""

    checked_steps: int
    clean_steps: int
    warnings: list[RunWarningRead] = Field(description="critical ones first, then by their newest step")
    whole_run: WarningRead | None = Field(
        description="the surprisal test over all steps together, where these have something to say that no step has"
    )
    whole_run_check: CheckRead | None = Field(description="what became of that test; null where no step was checked")
