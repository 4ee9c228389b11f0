"""Schemas of checkpoints."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from foreshock.api.runs import CheckpointFormat
from foreshock.model_kind import ModelKind


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
