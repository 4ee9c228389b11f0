"""Check the catalogue against the files of the store, in both directions; repair what can be repaired.

It may run beside the service: a file is published before its row is committed, so that a row always has its file, and
files in flight are no orphans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from foreshock.errors import RolloutsError
from foreshock_service.maintenance.fsck.contents import read_contents
from foreshock_service.maintenance.fsck.repository import CataloguedFile, catalogued_files
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.store.names import FileName, parse_name
from foreshock_service.platform.store.orphans import find_orphans
from foreshock_service.platform.store.tokens import ListedFile
from foreshock_service.runs.rollouts.service import set_file_bytes
from foreshock_service.runs.step_key import StepKey

Problem = Literal["missing", "damaged", "wrong size", "orphan"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A file that is not as the catalogue says; `repaired` tells how it was repaired, None if it was not."""

    problem: Problem
    kind: str
    file: str
    owner: str
    detail: str
    repaired: str | None = None

    @property
    def to_do(self) -> str | None:
        """What an operator does; None if it was repaired."""
        if self.repaired is not None:
            return None
        if self.problem in ("missing", "damaged"):
            again = "send the same shard again" if self.kind == "rollouts" else "request the probe again"
            return f"{again}, or copy the file from the backup: either restores it"
        if self.problem == "wrong size":
            return "run `foreshock fsck --repair`, which reads the file and corrects its row"
        return "the service removes it by itself; `foreshock fsck --repair` does it now"


@dataclass(slots=True)
class Report:
    """The outcome: files checked by kind, rows whose tokens were purged, files of others, and the findings."""

    checked: Counter[str] = field(default_factory=Counter)
    purged: int = 0
    foreign: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is left to repair."""
        return all(finding.repaired is not None for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Request:
    """`repair`: change what can be repaired. `quick`: compare names and sizes, and read no file."""

    repair: bool = False
    quick: bool = False


def check_store(context: ServiceContext, request: Request, progress: Callable[[int], None]) -> Report:
    """Check every row and every file; `progress` is called with the number of rows checked."""
    report = Report()
    orphans = list(find_orphans(context.store, context.database, context.settings.orphan_grace_seconds))
    spare = {_place(name): file for file in orphans if (name := parse_name(file.name)) is not None}
    with ThreadPoolExecutor(context.settings.decode_processes) as threads:
        for page in catalogued_files(context.database):
            sizes = context.store.sizes([file.name for file in page])
            # A purged file that is still there waits for its removal.
            there = [file for file in page if not file.purged]
            report.purged += len(page) - len(there)
            check = partial(_check, context, sizes, request.quick)
            for file, finding in zip(there, threads.map(check, there), strict=True):
                report.checked[file.kind] += 1
                progress(report.checked.total())
                if finding is not None:
                    report.findings.append(_repair(context, file, finding, spare) if request.repair else finding)
    report.findings += _orphan_findings(context, orphans, repair=request.repair)
    report.foreign = sum(1 for file in context.store.list_files() if parse_name(file.name) is None)
    return report


def _check(context: ServiceContext, sizes: dict[str, int], quick: bool, file: CataloguedFile) -> Finding | None:
    found = partial(Finding, kind=file.kind, file=file.name, owner=file.owner)
    size = sizes.get(file.name)
    if size is None:
        return found("missing", detail="a row names it, and the store does not have it")
    is_short = file.size is not None and size < file.size
    sizes_differ = f"it has {size:,} bytes, and its row says {file.size or 0:,}"
    if not quick:
        reason = _difference(context, file.name, file)
        if reason is not None:
            return found("damaged", detail=f"it is cut off: {sizes_differ}; {reason}" if is_short else reason)
    if file.size is not None and size != file.size:
        return found("wrong size", detail=sizes_differ)
    return None


def _difference(context: ServiceContext, name: str, file: CataloguedFile) -> str | None:
    """Return how the contents of a file differ from what the row says; None if they do not."""
    try:
        contents = context.decoders.run(read_contents, context.store.file(name), file.kind)
    except RolloutsError as error:
        return error.fault
    except (OSError, ProblemError) as error:
        return f"it cannot be read: {error}"
    expected = (file.rollouts, file.tokens)
    if file.rollouts is not None and (contents.rollouts, contents.tokens) != expected:
        return (
            f"it holds {contents.rollouts:,} rollouts and {contents.tokens:,} tokens, "
            f"and its row says {file.rollouts:,} and {file.tokens or 0:,}"
        )
    if file.rollout_set_digest not in (None, contents.rollout_set_digest):
        return "it holds other rollouts than its row says"
    return None


def _repair(
    context: ServiceContext, file: CataloguedFile, finding: Finding, spare: dict[tuple[object, ...], ListedFile]
) -> Finding:
    repaired: str | None = None
    name = parse_name(file.name)
    if finding.problem in ("missing", "damaged") and name is not None:
        copy = spare.get(_place(name))
        if copy is not None and _difference(context, copy.name, file) is None:
            _restore(context, copy.name, file.name)
            repaired = f"restored from {copy.name}, which holds the same"
    size = context.store.sizes([file.name]).get(file.name)
    intact = repaired is not None or (finding.problem == "wrong size" and _difference(context, file.name, file) is None)
    if intact and size is not None and size != file.size and file.key is not None:
        run_id, attempt, step, shard = file.key
        key, size_found = StepKey(run_id, attempt, step), size
        context.database.write(lambda session: set_file_bytes(session, key, shard, size_found))
        repaired = repaired or "its contents are intact: the row now has its size"
    if repaired is None:
        return finding
    return Finding(finding.problem, finding.kind, finding.file, finding.owner, finding.detail, repaired)


def _restore(context: ServiceContext, source: str, target: str) -> None:
    temporary = context.store.temporary_file()
    try:
        temporary.write_bytes(context.store.file(source).read_bytes())
        context.store.publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _orphan_findings(context: ServiceContext, orphans: list[ListedFile], *, repair: bool) -> Iterator[Finding]:
    for file in orphans:
        if repair:
            context.store.remove(file.name)
        name = parse_name(file.name)
        yield Finding(
            "orphan",
            kind="" if name is None else name.kind,
            file=file.name,
            owner="",
            detail=f"no row names it; {file.size:,} bytes, {file.age_seconds / 3600:,.1f} hours old",
            repaired="removed" if repair else None,
        )


def _place(name: FileName) -> tuple[object, ...]:
    """Return what two files share that were written from the same bytes for the same row."""
    return name.run_id, name.attempt, name.step, name.shard, name.job_id, name.digest
