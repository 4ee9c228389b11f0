"""Schemas of runs."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from foreshock.api.runs import AdviceMode, ShownRunState
from foreshock.diagnosis.quantities import check_declared
from foreshock.model_kind import ModelKind
from foreshock.page_addresses import DEFAULT_PROJECT
from foreshock_service.platform.parameters import Name

RunState = Literal["running", "finished", "failed"]
"""What a client or an operator sets."""


def _declared(names: dict[str, str]) -> dict[str, str]:
    check_declared(names)
    return names


ScalarNames = Annotated[dict[Name, Name], AfterValidator(_declared), Field(max_length=100)]
"""What the run calls the quantities that are watched: {"reward": "my/score"}."""


class RunCreate(BaseModel):
    """Run to get or create: (project, key) identifies it; the other fields are used only if it is new."""

    key: Name = Field(description="the client's own name for the run, unique in the project")
    project: Name = DEFAULT_PROJECT
    name: Name | None = None
    model: Name | None = None
    trainer: Name | None = None
    engine: Name | None = None
    hardware: Name | None = None
    initial_learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    length_cap: int | None = Field(default=None, gt=0, lt=2**31)
    model_kind: ModelKind | None = Field(
        default=None, description="decides the healthy ranges; absent: derived from an announced checkpoint"
    )
    advice_mode: AdviceMode = "shadow"
    scalar_names: ScalarNames | None = Field(
        default=None,
        description='the run\'s own scalars by the well-known name of what they are: {"reward": "my/score"}; '
        "a declared quantity has no other name",
    )


class RunUpdate(BaseModel):
    """Changes of a run; absent fields stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    state: RunState | None = None
    name: Name | None = None
    advice_mode: AdviceMode | None = None
    model_kind: ModelKind | None = Field(
        default=None, description="null: remove the declaration, so that the checkpoint's kind is used"
    )
    scalar_names: ScalarNames | None = Field(default=None, description="replaces the declaration; null: removes it")


class RunFilter(NamedTuple):
    """Which runs; empty or None: no restriction. The project must equal all of `projects`.

    `search` is a part of the name or key, in any case; `ids` None: any run, empty: none.
    """

    projects: tuple[str, ...] = ()
    key: str | None = None
    model: str | None = None
    model_kind: ModelKind | None = None
    states: tuple[ShownRunState, ...] = ()
    search: str | None = None
    ids: tuple[str, ...] | None = None
