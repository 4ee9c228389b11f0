"""Checkpoints that a run announces: the places from which workers load weights."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated

from fastapi import Response, status
from pydantic import AfterValidator, BaseModel, Field, StringConstraints
from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes, parse
from foreshock.api.runs import CheckpointFormat, CheckpointRecord
from foreshock.clock import now_us
from foreshock.model_kind import ModelKind
from foreshock_service.platform import pagination, parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.engine import insert_if_absent, upsert
from foreshock_service.platform.database.tables import Checkpoint
from foreshock_service.runs import attempts, runs

router = parameters.api_router(prefix="/v1/runs/{run}/checkpoints", tags=["checkpoints"])

_MOST_STEPS = 200


def inside_its_root(path: str) -> str:
    """Return the path if it is relative and stays below its root; raise ValueError otherwise."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\\" in path or not parts:
        raise ValueError("must be relative to its root, with `/`, and without `..`")
    return path


class CheckpointPut(BaseModel):
    """Location of existing weights, below a root that workers configure by name."""

    root: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    path: Annotated[
        str,
        StringConstraints(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$"),
        AfterValidator(inside_its_root),
    ]
    format: CheckpointFormat = "hf_safetensors"
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] = Field(
        description="of the weights, as `foreshock.digests.weights_digest` computes it"
    )
    model_kind: ModelKind | None = Field(
        default=None, description="of the checkpoint's config.json; holds for the run unless it declares another kind"
    )
    weights_version: int | None = Field(default=None, ge=0, lt=2**31)
    expires_at_us: int | None = Field(default=None, ge=0, lt=2**63, description="when the files may go; null: never")


@router.put(
    "/{step}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": CheckpointRecord, "description": "It was announced before; the newer words hold"}},
)
def put_checkpoint(
    run: runs.RunIdentifier,
    step: parameters.StepPath,
    body: CheckpointPut,
    context: Context,
    principal: security.Ingester,
    response: Response,
    attempt: parameters.AttemptQuery = 1,
) -> CheckpointRecord:
    """Announce the weights that sampled a step."""
    row = {"run_id": run, "attempt": attempt, "step": step, "announced_at_us": now_us(), **body.model_dump()}

    def announce(session: Session) -> bool:
        locked = runs.lock_run(session, principal, run)
        attempts.check_attempt(session, run, attempt)
        created = insert_if_absent(session, Checkpoint, row)
        if not created:
            upsert(session, Checkpoint, [row], ("run_id", "attempt", "step"))
        if body.model_kind is not None:
            runs.set_model_kind(session, locked, "derived_model_kind", body.model_kind)
        return created

    if not context.database.write(announce):
        response.status_code = status.HTTP_200_OK
    return parse(CheckpointRecord, row)


@router.get("")
def list_checkpoints(
    asked: runs.RunToRead, cursor: pagination.Cursor = None, limit: pagination.Limit = 200
) -> pagination.Page[CheckpointRecord]:
    """List announced checkpoints, by step."""
    with asked.reading() as session:
        query = select(Checkpoint).where(Checkpoint.run_id == asked.run)
        return pagination.page_of_query(
            session, query, (Checkpoint.step, Checkpoint.attempt), cursor, limit,
            lambda rows: [from_attributes(CheckpointRecord, row) for (row,) in rows], rising=True,
        )  # fmt: skip


def active_checkpoints(session: Session, run_id: str) -> Sequence[Checkpoint]:
    """Return the newest checkpoints of active steps whose files should still be there, newest first."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, attempts.active_rows(session, run_id, Checkpoint))
    return session.scalars(query.where(_is_there()).order_by(Checkpoint.step.desc()).limit(_MOST_STEPS)).all()


def announced_steps(session: Session, run_id: str) -> list[int]:
    """Return the newest steps with a checkpoint whose files should still be there, ascending."""
    query = select(Checkpoint.step).where(Checkpoint.run_id == run_id, _is_there()).order_by(Checkpoint.step.desc())
    return sorted(set(session.scalars(query.limit(_MOST_STEPS))))


def _is_there() -> ColumnElement[bool]:
    return or_(Checkpoint.expires_at_us.is_(None), Checkpoint.expires_at_us > now_us())
