"""Runs and what belongs to them: attempts, steps, changes, checkpoints, measures."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from foreshock.api.diagnosis import RunVerdict
from foreshock.api.records import NAN, Measured, Record, parse
from foreshock.changes import ChangeKind
from foreshock.interval_names import RANGE, RANGE_NOTE
from foreshock.learning_rate.modes import AdviceMode
from foreshock.model_kind import ModelKind, known_model_kind
from foreshock.notary.compare import Verdict
from foreshock.severity import Severity

ShownRunState = Literal["running", "stale", "finished", "failed"]
"""`stale`: running, but its clients have given no sign of life for FORESHOCK_STALE_SECONDS."""
CheckpointFormat = Literal["hf_safetensors", "fsdp", "dcp", "megatron"]
FindingSource = Literal["attribution", "doctor", "lint", "notary"]
Plain = str | float | int | bool
"""A value of the setup."""


LARGEST_STEP = 2**31 - 1
"""Largest step that the API takes: a database stores it in 32 bits."""

LONGEST_NAME, NAME_PATTERN = 200, r"^[^\x00-\x1f\x7f]+$"
"""Of what users name, such as scalars: one line."""

MOST_SCALARS = 1000
"""In one request."""


class RunRecord(Record):
    """A run."""

    id: str
    key: str
    project: str
    name: str | None = None
    model: str | None = None
    trainer: str | None = None
    engine: str | None = None
    hardware: str | None = None
    initial_learning_rate: float | None = None
    length_cap: int | None = None
    model_kind: Annotated[ModelKind | None, "null: unknown, treated as dense"] = None
    model_kind_source: Literal["declared", "checkpoint"] | None = None
    advice_mode: AdviceMode
    scalar_names: Annotated[Mapping[str, str] | None, "null: the well-known names"] = None
    state: ShownRunState
    last_step: Annotated[int | None, "newest step that has rollouts, without those that a resume superseded"] = None
    seen_at_us: Annotated[int | None, "last sign of life of the clients; null: they send none"] = None
    created_at_us: int
    updated_at_us: int
    diagnosis: Annotated[RunVerdict | None, "in one sentence"] = None
    advancing: Annotated[bool, "true while alerts, advice and diagnosis are worked out from new data, up to 1 s"] = (
        False
    )
    tags: tuple[str, ...] = ()
    note: str | None = None
    baseline: Annotated[str | None, "id of the run to compare with"] = None
    tracker_url: Annotated[str | None, "page of the run in a tracker, such as W&B"] = None

    @property
    def title(self) -> str:
        """The run's name, else the client's key."""
        return self.name or self.key


class AttemptRecord(Record):
    """An attempt: a start or resume of a run; its number counts from 1 in each run."""

    attempt: int
    key: str
    resume_step: Annotated[int, "the first step that it computes"]
    created_at_us: int


class StepRecord(Record):
    """A step of one attempt."""

    step: int
    attempt: int
    shards: Annotated[int, "number of stored shards"]
    expected_shards: int
    closed: bool
    rollouts: int
    tokens: Annotated[int, "response tokens"]
    full_rollouts: Annotated[int, "rollouts stored in full; all, unless shards were sent as statistics"]
    coverage: Annotated[str, "what the measures of the step rest on"]


class IncompleteStep(Record):
    """A step that closed without some of its shards: its measurements are of the rollouts that arrived."""

    step: int
    attempt: int
    shards: int
    expected_shards: int


class OfStep(Record):
    """What every answer about one step says of its shards."""

    incomplete: Annotated[IncompleteStep | None, "how the step closed without some shards; null: not so"] = None


class Coverage(Record):
    """What an answer rests on: all tokens of the step, or some of its rollouts."""

    rests_on: Literal["all tokens", "some rollouts"]
    rollouts: Annotated[int, "rollouts of the step"]
    used_rollouts: Annotated[int, "those that the answer rests on"]
    full_rollouts: Annotated[int, "those that are stored in full; all, unless shards were sent as statistics"]
    text: str


class StatisticsStep(Record):
    """A step with shards that were sent as statistics: measured over all tokens, with some rollouts in full."""

    step: int
    attempt: int
    rollouts: int
    full_rollouts: int
    text: str


class ShardReceipt(Record):
    """The receipt of a stored shard: `stored` by this upload, or `duplicate` of an earlier upload of the same bytes."""

    status: Literal["stored", "duplicate"]
    digest: Annotated[str, "of the body's bytes: `sha256:…`"]
    rollouts: int
    tokens: Annotated[int, "response tokens"]
    full_rollouts: Annotated[int, "rollouts that are stored in full; below `rollouts` if sent as statistics"]


class DifferenceRecord(Record):
    """A field of the setup, such as `engine.dtype`, and its values before and after."""

    name: str
    before: tuple[Plain, ...]
    after: tuple[Plain, ...]


class ChangeRecord(Record):
    """A change at a step: announced by the trainer, or of the setup that its rollouts name."""

    step: Annotated[int, "the first step with what is new"]
    attempt: int
    kind: ChangeKind | Literal["setup"]
    note: str | None = None
    before: str | float | None = None
    after: str | float | None = None
    differences: Annotated[tuple[DifferenceRecord, ...], "of the setup; else empty"] = ()
    rebaseline: Annotated[bool, "whether the baselines of the detectors begin anew at this step"]


class CheckpointRecord(Record):
    """Announced weights, below a root that workers configure by name."""

    step: int
    attempt: int
    root: str
    path: str
    format: CheckpointFormat
    digest: Annotated[str, "of the weights, as `foreshock.digests.weights_digest` computes it"]
    model_kind: Annotated[ModelKind | None, "by its config.json; of the run too unless it declares one"] = None
    weights_version: int | None = None
    expires_at_us: Annotated[int | None, "when the files may go; null: never"] = None
    announced_at_us: int


class MeasureRecord(Record):
    """A registered measure: its meaning and its source."""

    name: str
    column: Annotated[str, "column name in JSON, CSV, Parquet and SQL"]
    kind: str
    formula: str
    unit: str
    direction: str
    aggregation: str
    source: str


class ConfidenceRecord(Record):
    """How sure a named cause is: the share of the mismatch that its link has, with its interval."""

    share: Annotated[Measured, "E[d_link·d]/E[d²]"]
    low: Annotated[Measured, f"of a {RANGE}. {RANGE_NOTE}"] = NAN
    high: Measured = NAN


class WeightsRecord(Record):
    """What one engine held after the weight sync of a step, as the notary found it."""

    step: int
    attempt: int
    engine: str
    is_right: Annotated[bool, "it holds what the trainer announced for the step"]
    sentence: str
    verdict: Verdict


class FindingRecord(Record):
    """What is concluded from a run's stored data: a cause by an attribution or the doctor, a warning of the lint or of
    the notary."""

    run: str
    run_key: str
    project: str
    source: FindingSource
    name: Annotated[
        str,
        "of the lint: the check; of an attribution: the link that is the cause, or `trainer-precision`; of the doctor: "
        "the cause and the side, such as `other_weights/rollout`; of the notary: `weights_differ`",
    ]
    title: str
    severity: Annotated[Severity, "of the worst step; `info` for causes, which say where and not how much"]
    sentence: Annotated[str, "the evidence at the newest step that has it"]
    remedy: Annotated[str | None, "recommended action; null if none is known"]
    steps: Annotated[int, "number of active steps that have it; of an attribution: of the newest 200"]
    first_step: int
    newest_step: int
    confidence: Annotated[ConfidenceRecord | None, "at the newest step; null if the source has none"] = None
    changed_at_us: Annotated[int, "when a step was last added or removed, or its severity changed"]


def run_record(value: Mapping[str, Any]) -> RunRecord:
    """Parse a run; a kind of model that this release does not know is None."""
    return parse(RunRecord, {**value, "model_kind": known_model_kind(value.get("model_kind"))})
