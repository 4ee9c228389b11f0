"""The body of a request for a probe, and probes as they are shown."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from foreshock.probe_kinds import DOCTOR, DOCTOR_CANDIDATES, DOCTOR_SECONDS, EXACT, PROBE_KINDS, ROUTING
from foreshock.scorers import REFERENCE, TRAINER_REPLAY
from foreshock_service.platform.database.tables import ProbeJob
from foreshock_service.platform.parameters import AttemptNumber, JsonObject, Step
from foreshock_service.replay.probes.environments import names_in_words
from foreshock_service.replay.probes.jobs import Priority

if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(PROBE_KINDS)]
ScorerName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[a-z0-9_]+\.[a-z0-9_]+$")]
VariantName = Annotated[str, StringConstraints(max_length=100, pattern=r"^[a-z0-9_.-]*$")]
Accelerator = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


EnvironmentName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
PairKey = Annotated[
    str, StringConstraints(max_length=201, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$")
]


def scorers_of_pairs(pairs: Iterable[str]) -> set[str]:
    """Return the scorers of exact pairs, whose options apply to them."""
    return {scorer for pair in pairs for scorer in pair.split("/")}


class ScorerRequest(BaseModel):
    """A scorer and its variant: empty, or `rebatched` for its noise floor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scorer: ScorerName
    variant: VariantName = ""


class ProbeCreate(BaseModel):
    """A request for scores. An equal request for the same rollouts and weights is the same probe."""

    model_config = ConfigDict(extra="forbid")

    step: Step
    attempt: AttemptNumber | None = Field(default=None, description="absent: the attempt in which the step is active")
    scorers: list[ScorerRequest] = Field(
        default_factory=list,
        max_length=32,
        description="an examination by the doctor names none; a "
        f"comparison by layer two, of which the second is the reference, {TRAINER_REPLAY} and {REFERENCE} if absent; "
        f"one of routed experts two, π and μ, {' and '.join(ROUTING.default_scorers)} if absent",
    )
    exact_pairs: list[PairKey] = Field(
        default=[], max_length=8, description="comparisons `target/behaviour` to compute over the whole vocabulary"
    )
    kind: KindName = Field(
        default=EXACT.name, description=". ".join(f"{name}: {kind.meaning}" for name, kind in PROBE_KINDS.items())
    )
    accelerator: Accelerator | None = Field(default=None, description="only on workers of this accelerator")
    environment: EnvironmentName | None = Field(
        default=None,
        description="absent: the run's own if the worker offers it, else as the worker is; `run`: the run's own only; "
        "`any`: as the worker is; a name that workers offer, such as avx2: that one only",
    )
    max_rollouts: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="score a sample of so many rollouts, stratified by length"
    )
    priority: Priority | None = Field(
        default=None,
        description="which queued job is leased first; absent: urgent near an open alert of the run, else normal. An "
        "urgent one counts as queued a day earlier",
    )
    options: dict[ScorerName, JsonObject] = Field(
        default_factory=dict, description="options by scorer; the worker checks them"
    )
    budget_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = Field(
        default=None, description=f"of the doctor: the time for its replays; absent: {DOCTOR_SECONDS:.0f}"
    )
    max_candidates: int = Field(
        default=DOCTOR_CANDIDATES,
        ge=0,
        le=32,
        description="of the doctor: try the weights of so many earlier announced steps",
    )
    against: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = Field(
        default=None,
        description="of the doctor: the id of another run of the project, whose newest weights up to this step are "
        "tried too, as a whole, in parts, and each field in which its configuration differs",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        kind = PROBE_KINDS[self.kind]
        self.scorers = self.scorers or [ScorerRequest(scorer=name) for name in kind.default_scorers]
        kind.check(len(self.scorers), len(self.exact_pairs), with_variants=any(each.variant for each in self.scorers))
        self.max_rollouts = kind.sample(self.max_rollouts)
        if kind is DOCTOR and [each.scorer for each in self.scorers] != list(kind.default_scorers):
            raise ValueError(f"{kind.noun} names no scorers: it makes replays of its own")
        given = [name for name in ("budget_seconds", "against") if getattr(self, name) is not None]
        if kind is not DOCTOR and given:
            raise ValueError(f"{given[0]} is of the doctor")
        if not self.scorers and not self.exact_pairs:
            raise ValueError("a probe needs at least one item in `scorers` or `exact_pairs`, got none")
        return self


def environment_note(job: ProbeJob) -> str | None:
    """Return why a leased or ended job is not scored in an environment that it wants; None if it is scored in one."""
    if not job.environments or job.environment is not None or job.worker is None:
        return None
    names = names_in_words(job.environments)
    return f"{job.worker} does not offer the run's own environment ({names}) and was used as it is"
