"""Check the catalogue against the files of the store, in both directions; repair what can be repaired.

It may run beside the service: a file is published before its row is committed, so that a row always has its file, and
an orphan is removed only once no row can name it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from sqlalchemy import Row, Select, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from foreshock.commands.text import Progress
from foreshock.errors import RolloutsError
from foreshock_service.maintenance import stored_files
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ExactShard, Probe, ProbeJob, Run, ScoreShard, Shard
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.settings import load_settings
from foreshock_service.platform.store.removal import find_orphans, take_orphan
from foreshock_service.platform.store.tokens import FileName, ListedFile, parse_name
from foreshock_service.runs import deletions, events, runs, shards

Problem = Literal["missing", "damaged", "wrong size", "orphan"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A file that differs from its catalogue row; `repaired` says how it was repaired, None if it was not."""

    problem: Problem
    kind: str
    file: str
    owner: str
    detail: str
    repaired: str | None = None

    @property
    def to_do(self) -> str | None:
        """What the operator should do; None if it was repaired."""
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
    """Numbers of checked files by kind, of rows with purged tokens and of files of other programs; the findings."""

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
    # Two files with equal parts were written from the same bytes for the same row.
    spare = {name: file for file in orphans if (name := parse_name(file.name)) is not None}
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
        contents = context.decoders.run(stored_files.read_contents, context.store.file(name), file.kind)
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
    context: ServiceContext, file: CataloguedFile, finding: Finding, spare: dict[FileName, ListedFile]
) -> Finding:
    repaired: str | None = None
    name = parse_name(file.name)
    if finding.problem in ("missing", "damaged") and name is not None:
        # A copy of the upload would bring deleted rollouts back.
        copy = None if file.stripped else spare.get(name)
        if copy is not None and _difference(context, copy.name, file) is None:
            _restore(context, copy.name, file.name)
            repaired = f"restored from {copy.name}, which holds the same"
            if file.key is not None:
                # A deletion may have passed the step while the file was gone.
                context.database.write(partial(_search_again, events.StepKey(*file.key[:3])))
    size = context.store.sizes([file.name]).get(file.name)
    intact = repaired is not None or (finding.problem == "wrong size" and _difference(context, file.name, file) is None)
    if intact and size is not None and size != file.size and file.key is not None:
        run_id, attempt, step, shard = file.key
        key, size_found = events.StepKey(run_id, attempt, step), size
        context.database.write(lambda session: shards.set_file_bytes(session, key, shard, size_found))
        repaired = repaired or "its contents are intact: the row now has its size"
    if repaired is None:
        return finding
    return replace(finding, repaired=repaired)


def _search_again(key: events.StepKey, session: Session) -> None:
    if runs.lock_run_for_background(session, key.run_id) is not None:
        deletions.search_step_again(session, key)


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
            if not take_orphan(context.database, file):
                continue
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


_ROWS_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class CataloguedFile:
    """A file that a row names, and what the row says of it; None: it does not say.

    `key` is that of a shard of rollouts: run, attempt, step, shard. `purged`: the run was deleted or retention purged
    the tokens, so that the file may be gone. `stripped`: rollouts of it were deleted.
    """

    kind: str
    name: str
    owner: str
    rollouts: int | None
    tokens: int | None
    size: int | None
    rollout_set_digest: str | None
    purged: bool
    key: tuple[str, int, int, int] | None = None
    stripped: bool = False


def catalogued_files(database: Database) -> Iterator[list[CataloguedFile]]:
    """Yield the files of all rows: shards of rollouts, then scores, then exact divergences."""
    shard = (Shard.run_id, Shard.attempt, Shard.step, Shard.shard)
    of_runs = select(Shard, Run.deleted_at_us).join(Run, Run.id == Shard.run_id)
    yield from _pages(database, of_runs, shard, _of_shard)
    score = (ScoreShard.job_id, ScoreShard.token, ScoreShard.scorer, ScoreShard.variant, ScoreShard.shard)
    yield from _pages(database, _with_run(ScoreShard), score, partial(_of_job, "scores"))
    exact = (ExactShard.job_id, ExactShard.token, ExactShard.pair, ExactShard.shard)
    yield from _pages(database, _with_run(ExactShard), exact, partial(_of_job, "exact"))


def _with_run(table: type[ScoreShard] | type[ExactShard]) -> Select[*tuple[Any, ...]]:
    query = select(table, Run.deleted_at_us, Probe.run_id, Probe.attempt, Probe.step)
    query = query.join(ProbeJob, ProbeJob.id == table.job_id).join(Probe, Probe.id == ProbeJob.probe_id)
    return query.join(Run, Run.id == Probe.run_id)


def _pages(
    database: Database,
    query: Select[*tuple[Any, ...]],
    key: Sequence[InstrumentedAttribute[Any]],
    read: Callable[[Row[Any]], CataloguedFile],
) -> Iterator[list[CataloguedFile]]:
    names = [column.key for column in key]
    after: tuple[Any, ...] | None = None
    while True:
        chosen = query if after is None else query.where(tuple_(*key) > after)
        with database.read() as session:
            rows = session.execute(chosen.order_by(*key).limit(_ROWS_AT_ONCE)).all()
            page = [read(row) for row in rows]
        if not page:
            return
        after = tuple(getattr(rows[-1][0], name) for name in names)
        yield page


def _of_shard(row: Row[Any]) -> CataloguedFile:
    shard: Shard = row[0]
    in_full = shard.full_rollouts is None
    return CataloguedFile(
        kind="rollouts",
        name=shard.file,
        owner=f"run {shard.run_id}, attempt {shard.attempt}, step {shard.step}, shard {shard.shard}",
        # The row keeps the numbers of the upload if rollouts of it were deleted.
        rollouts=None if shard.deleted_rollouts else (shard.rollouts if in_full else shard.full_rollouts),
        tokens=None if shard.deleted_rollouts else (shard.tokens if in_full else shard.full_tokens),
        size=shard.file_bytes,
        rollout_set_digest=shard.rollout_set_digest if in_full and not shard.deleted_rollouts else None,
        purged=row.deleted_at_us is not None or shard.tokens_removed is not None,
        key=(shard.run_id, shard.attempt, shard.step, shard.shard),
        stripped=bool(shard.deleted_rollouts),
    )


def _of_job(kind: str, row: Row[Any]) -> CataloguedFile:
    shard: ScoreShard | ExactShard = row[0]
    what = shard.pair if isinstance(shard, ExactShard) else f"{shard.scorer} {shard.variant}".strip()
    return CataloguedFile(
        kind=kind,
        name=shard.file,
        owner=f"run {row.run_id}, attempt {row.attempt}, step {row.step}, {what}, shard {shard.shard}",
        rollouts=shard.rollouts,
        tokens=shard.tokens,
        size=None,
        rollout_set_digest=None,
        purged=row.deleted_at_us is not None,
    )


def fsck(request: Request, *, as_json: bool, decoders: DecoderPool | None = None) -> int:
    """Check the store and print the report; return 0 if nothing is left to repair, else 1. Raises ConfigurationError.

    `decoders` is a pool to share; None: it makes one.
    """
    # Nothing is measured, so nothing needs to be compiled.
    settings = load_settings().model_copy(update={"token_pass": "numpy"})
    with stored_files.maintenance_context(settings, decoders) as context:
        with context.database.read() as session:
            progress = Progress("checking files", _count(session))
        report = check_store(context, request, progress.show)
    if as_json:
        print(json.dumps(_document(report), indent=2, ensure_ascii=False))
    else:
        _show(report, request)
    return 0 if report.is_sound else 1


def _document(report: Report) -> dict[str, object]:
    return {
        "sound": report.is_sound,
        "checked": dict(report.checked),
        "purged": report.purged,
        "foreign": report.foreign,
        "findings": [asdict(finding) | {"to_do": finding.to_do} for finding in report.findings],
    }


def _show(report: Report, request: Request) -> None:
    checked = ", ".join(f"{count:,} of {kind}" for kind, count in sorted(report.checked.items())) or "none"
    how = "names and sizes" if request.quick else "names, sizes and contents"
    print(f"files checked by {how}: {checked}")
    if report.purged:
        print(f"purged by retention or with their runs: {report.purged:,}")
    if report.foreign:
        print(f"not written by the service, and left: {report.foreign:,}")
    counts = Counter((finding.problem, finding.repaired is not None) for finding in report.findings)
    if not counts:
        print("the catalogue and the files agree")
        return
    print(f"{'problem':<12}{'found':>8}{'repaired':>10}")
    for problem in dict.fromkeys(finding.problem for finding in report.findings):
        repaired = counts[problem, True]
        print(f"{problem:<12}{repaired + counts[problem, False]:>8,}{repaired:>10,}")
    for finding in report.findings:
        whose = f" ({finding.owner})" if finding.owner else ""
        print(f"\n{finding.problem}: {finding.file}{whose}\n  {finding.detail}")
        print(f"  repaired: {finding.repaired}" if finding.repaired else f"  to do: {finding.to_do}")


def _count(session: Session) -> int:
    return sum(
        session.scalar(select(func.count()).select_from(table)) or 0 for table in (Shard, ScoreShard, ExactShard)
    )
