"""`foreshock check`: compare the catalogue with the files of the store in both directions, and change nothing.

It may run beside the service: a file is published before its row is committed, and an orphan is older than the grace.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from foreshock import rollouts
from foreshock.digests import rollout_set_digest
from foreshock.errors import RolloutsError
from foreshock_service.maintenance.stored_files import maintenance_context
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Probe, ProbeJob, Run, ScoreFile, Shard
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.settings import load_settings
from foreshock_service.platform.store.removal import find_orphans
from foreshock_service.platform.store.tokens import StoredFile

_DECODE: dict[type, Callable[..., Any]] = {
    Shard: rollouts.decode_rollouts,
    ScoreFile: rollouts.decode_scores,
}
_TO_DO = (
    "missing or damaged rollouts: send the same shard again; scores: request the probe again; or copy the file from "
    "a backup. The service removes files that no row names by itself."
)


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that a row of the catalogue names, and what the row says of it; None: it does not say."""

    row: Shard | ScoreFile
    place: str
    rollouts: int
    tokens: int
    size: int | None = None
    digest: str | None = None


def check() -> int:
    """Print each file that differs from the catalogue; return 1 if there is one. Raises ConfigurationError."""
    with maintenance_context(load_settings()) as context:
        checked, problems = check_store(context)
    print("\n".join([*problems, f"{checked:,} files checked, {len(problems):,} problems"]))
    if problems:
        print(_TO_DO)
    return 1 if problems else 0


def check_store(context: ServiceContext) -> tuple[int, list[str]]:
    """Return the number of files that rows name, and a line for each problem; the contents of each file are read."""
    checked = 0
    problems: list[str] = []
    for files in named_files(context.database):
        sizes = context.store.sizes([file.row.file for file in files])
        for file in files:
            checked += 1
            fault = _fault(context.store.file(file.row.file), file, sizes.get(file.row.file))
            if fault is not None:
                problems.append(f"{fault}: {file.row.file} ({file.place})")
    orphans = find_orphans(context.store, context.database, context.settings.orphan_grace_seconds)
    problems += [f"no row names it: {orphan.name}, {orphan.size:,} bytes" for orphan in orphans]
    return checked, problems


def named_files(database: Database) -> Iterator[list[NamedFile]]:
    """Yield the files of each run that was not deleted. Those of purged tokens may be gone, and are left out."""
    with database.read() as session:
        runs = session.scalars(select(Run.id).where(Run.deleted_at_us.is_(None)).order_by(Run.id)).all()
    for run in runs:
        with database.read() as session:
            shards = select(Shard).where(Shard.run_id == run, Shard.tokens_purged_at_us.is_(None))
            files = [_of_shard(shard) for shard in session.scalars(shards)]
            scores = select(ScoreFile, Probe.attempt, Probe.step).join(ProbeJob, ProbeJob.id == ScoreFile.job_id)
            of_run = scores.join(Probe, Probe.id == ProbeJob.probe_id).where(Probe.run_id == run)
            for row, attempt, step in session.execute(of_run):
                files.append(NamedFile(row, _place(run, attempt, step), row.rollouts, row.tokens))
        if files:
            yield sorted(files, key=lambda file: file.row.file)


def _of_shard(shard: Shard) -> NamedFile:
    place = f"{_place(shard.run_id, shard.attempt, shard.step)}, shard {shard.shard}"
    if shard.full_rollouts is None or shard.full_tokens is None:
        held = (shard.rollouts, shard.tokens, shard.file_bytes, shard.rollout_set_digest)
        return NamedFile(shard, place, *held)
    return NamedFile(shard, place, shard.full_rollouts, shard.full_tokens, shard.file_bytes)


def _place(run: str, attempt: int, step: int) -> str:
    return f"run {run}, attempt {attempt}, step {step}"


def _fault(stored: StoredFile, file: NamedFile, size: int | None) -> str | None:
    if size is None:
        return "missing"
    try:
        held = _DECODE[type(file.row)](stored.read_bytes(), stored_limits())
    except RolloutsError as error:
        return f"damaged, {error.fault}"
    except OSError as error:
        return f"cannot be read, {error}"
    if (held.num_rollouts, held.num_tokens) != (file.rollouts, file.tokens):
        expected = f"{file.rollouts:,} and {file.tokens:,}"
        return f"holds {held.num_rollouts:,} rollouts and {held.num_tokens:,} tokens, not {expected}"
    if file.digest not in (None, rollout_set_digest(held.sample_ids)):
        return "holds other rollouts than its row says"
    if file.size not in (None, size):
        return f"has {size:,} bytes, not {file.size:,}"
    return None
