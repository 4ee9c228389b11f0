"""`foreshock remeasure` on the database and the token store that the settings name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from foreshock.commands.text import Progress
from foreshock.errors import ConfigurationError
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.maintenance.context import maintenance_context
from foreshock_service.maintenance.remeasure import repository
from foreshock_service.maintenance.remeasure.repository import Choice
from foreshock_service.maintenance.remeasure.service import StepReport, check_step, remeasure_step
from foreshock_service.maintenance.run_names import run_called
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import load_settings
from foreshock_service.runs.step_key import StepKey


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments: a run by id, key or name (None: all), and a selection of its steps."""

    run: str | None = None
    attempt: int | None = None
    step: int | None = None
    everything: bool = False
    dry_run: bool = False


def remeasure(request: Request, decoders: DecoderPool | None = None) -> int:
    """Measure the requested steps again; return 0 if nothing was left unchanged, else 1. Raises ConfigurationError.

    `decoders` lets a process that has a pool share it.
    """
    with maintenance_context(load_settings(), decoders) as context:
        keys = _chosen(context, request)
        if not keys:
            print(f"nothing to do: all statistics are of version {STATISTICS_VERSION}, which this release reads")
            return 0
        print(_extent(context, keys), flush=True)
        if request.dry_run:
            left = [report for report in map(partial(check_step, context), keys) if report.left is not None]
            _show(left)
            print(f"{len(keys) - len(left)} of {len(keys)} steps would be measured again; nothing was changed")
        else:
            left = _measure_all(context, keys)
            print(f"{len(keys) - len(left)} of {len(keys)} steps were measured again")
    return 1 if left else 0


def _measure_all(context: ServiceContext, keys: Sequence[StepKey]) -> list[StepReport]:
    """Measure the steps again, as many at once as there are decoders; return the reports of incomplete ones."""
    progress = Progress("measuring again", len(keys))
    if not context.decoders.is_warm:
        context.decoders.warm_up()
    left: list[StepReport] = []
    with ThreadPoolExecutor(context.settings.decode_processes) as threads:
        done = 0
        try:
            for report in threads.map(partial(remeasure_step, context), keys):
                done += 1
                progress.show(done)
                if report.left is not None:
                    left.append(report)
        except BaseException:
            # Interrupted: finish the running steps, start no other.
            threads.shutdown(cancel_futures=True)
            print(f"\nended early, after {done} of {len(keys)} steps: run it again to continue", file=sys.stderr)
            raise
    _show(left)
    return left


def _chosen(context: ServiceContext, request: Request) -> list[StepKey]:
    with context.database.read() as session:
        run_id = run_called(session, request.run).id if request.run is not None else None
        keys = repository.steps_to_measure(session, Choice(run_id, request.attempt, request.step, request.everything))
        if not keys and request.step is not None:
            everything = Choice(run_id, request.attempt, request.step, everything=True)
            if not repository.steps_to_measure(session, everything):
                raise ConfigurationError(f"there is no step {request.step}")
    return keys


def _extent(context: ServiceContext, keys: Sequence[StepKey]) -> str:
    with context.database.read() as session:
        extents = [repository.extent_of(session, key) for key in keys]
    runs, files = len({key.run_id for key in keys}), sum(each.shards for each in extents)
    megabytes = sum(each.file_bytes for each in extents) / 1e6
    return f"{len(keys)} steps of {runs} runs, {files} token files of {megabytes:,.1f} MB together"


def _show(left: Iterable[StepReport]) -> None:
    for report in left:
        run_id, attempt, step = report.key
        print(f"left: run {run_id}, attempt {attempt}, step {step}: {report.left}", file=sys.stderr)
