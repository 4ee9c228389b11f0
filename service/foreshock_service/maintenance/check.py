"""`foreshock check`: compare the catalogue with the files of the store in both directions, and change nothing.

It may run beside the service: a file is published before its row is committed, and an orphan is older than the grace.
"""

from collections.abc import Callable
from typing import Any

from sqlalchemy import select

from foreshock import rollouts
from foreshock.digests import rollout_set_digest
from foreshock.errors import RolloutsError
from foreshock_service.maintenance.stored_files import maintenance_context
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Probe, ProbeJob, Run, ScoreFile, Shard
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.settings import load_settings
from foreshock_service.platform.store.removal import find_orphans

_DECODE: dict[type, Callable[..., Any]] = {Shard: rollouts.decode_rollouts, ScoreFile: rollouts.decode_scores}
_TO_DO = (
    "missing or damaged rollouts: send the same shard again; scores: request the probe again; or copy the file from "
    "a backup. The service removes files that no row names by itself."
)


def check() -> int:
    """Print each file that differs from the catalogue; return 1 if there is one. Raises ConfigurationError."""
    with maintenance_context(load_settings()) as context:
        checked, problems = check_store(context)
    print("\n".join([*problems, f"{checked:,} files checked, {len(problems):,} problems"]))
    if problems:
        print(_TO_DO)
    return 1 if problems else 0


def check_store(context: ServiceContext) -> tuple[int, list[str]]:
    """Return the number of files that rows name, and a line for each problem; the contents of each file are read.

    Files of deleted runs and of purged tokens may be gone, and are left out.
    """
    checked, problems = 0, list[str]()
    with context.database.read() as session:
        runs = session.scalars(select(Run.id).where(Run.deleted_at_us.is_(None)).order_by(Run.id)).all()
    for run in runs:
        with context.database.read() as session:
            shards = select(Shard).where(Shard.run_id == run, Shard.tokens_purged_at_us.is_(None))
            named: list[tuple[Shard | ScoreFile, str]] = [
                (row, f"attempt {row.attempt}, step {row.step}, shard {row.shard}") for row in session.scalars(shards)
            ]
            scores = select(ScoreFile, Probe.attempt, Probe.step).join(ProbeJob, ProbeJob.id == ScoreFile.job_id)
            of_run = scores.join(Probe, Probe.id == ProbeJob.probe_id).where(Probe.run_id == run)
            named += [(row, f"attempt {attempt}, step {step}") for row, attempt, step in session.execute(of_run)]
        for row, place in sorted(named, key=lambda each: each[0].file):
            checked += 1
            fault = _fault(context, row)
            if fault is not None:
                problems.append(f"{fault}: {row.file} (run {run}, {place})")
    orphans = find_orphans(context.store, context.database, context.settings.orphan_grace_seconds)
    problems += [f"no row names it: {orphan.name}, {orphan.size:,} bytes" for orphan in orphans]
    return checked, problems


def _fault(context: ServiceContext, row: Shard | ScoreFile) -> str | None:
    """Return how a file differs from its row; that of a shard sent as statistics has a part of the rollouts."""
    rollouts, tokens = row.rollouts, row.tokens
    if isinstance(row, Shard) and row.full_rollouts is not None and row.full_tokens is not None:
        rollouts, tokens = row.full_rollouts, row.full_tokens
    try:
        body = context.store.file(row.file).read_bytes()
        held = _DECODE[type(row)](body, stored_limits())
    except FileNotFoundError:
        return "missing"
    except RolloutsError as error:
        return f"damaged, {error.fault}"
    except OSError as error:
        return f"cannot be read, {error}"
    if (held.num_rollouts, held.num_tokens) != (rollouts, tokens):
        expected = f"{rollouts:,} and {tokens:,}"
        return f"holds {held.num_rollouts:,} rollouts and {held.num_tokens:,} tokens, not {expected}"
    if isinstance(row, Shard):
        is_whole = row.full_rollouts is None or row.full_tokens is None
        if is_whole and row.rollout_set_digest != rollout_set_digest(held.sample_ids):
            return "holds other rollouts than its row says"
        if len(body) != row.file_bytes:
            return f"has {len(body):,} bytes, not {row.file_bytes:,}"
    return None
