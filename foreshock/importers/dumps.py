"""What an importer finds and reads: dumps of a training framework, one per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from foreshock.errors import InvalidRolloutsError
from foreshock.importers.log_probs import Kind
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.limits import DecodeLimits

__all__ = ["Dump", "DumpFormat", "ImportedStep", "ReadOptions", "refusal"]


@dataclass(frozen=True, slots=True)
class Dump:
    """The files of one step.

    `finished` is what the framework's own marker tells: True, False, or None if the framework writes no marker.
    `missing` names files of the step that are not there yet.
    """

    step: int
    files: tuple[Path, ...]
    finished: bool | None = None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportedStep:
    """The content of a dump: one batch per shard, numbers under the framework's own names, and remarks for the user."""

    step: int
    batches: tuple[RolloutBatch, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading.

    `allow_pickle` permits formats that are pickles. `log_probs` states the kind of the dump's log-probs for a dump that
    leaves it open. `reward_key` is the entry of rewards that are mappings.
    """

    allow_pickle: bool = False
    log_probs: Kind | None = None
    reward_key: str | None = None
    attributes: BatchAttributes = field(default_factory=BatchAttributes)
    limits: DecodeLimits = field(default_factory=DecodeLimits)

    def attributes_or(self, **defaults: Any) -> BatchAttributes:
        """Return the attributes, with these in place of those that the user did not give."""
        lacking = {name: value for name, value in defaults.items() if getattr(self.attributes, name) is None}
        return replace(self.attributes, **lacking)


class DumpFormat(Protocol):
    """A format of dumps, one module each; `foreshock.importers.FORMATS` has all of them."""

    name: str
    """The value of `foreshock import --format`."""
    framework: str
    """The trainer's name for the description of the run."""
    layout: str
    """The files, in words, for error messages."""
    pickled: bool
    """True if the files are pickles, which are read only if the user asks for it."""

    def find(self, path: Path) -> list[Dump]:
        """Return the dumps at or below `path` by step; none if there are no files of this format."""

    def has_end(self, path: Path) -> bool:
        """Return True if the file ends as the framework's writer ends it."""

    def read(self, dump: Dump, options: ReadOptions) -> ImportedStep:
        """Read a finished dump. Raises RolloutsError naming file, line or row, and field."""


def refusal(place: str, field: str | None, problem: str) -> InvalidRolloutsError:
    """Return the error of an invalid value: `rank_0.jsonl, line 3, field `token_ids`: problem`."""
    where = f"{place}, field `{field}`" if field is not None else place
    return InvalidRolloutsError(f"{where}: {problem}")
