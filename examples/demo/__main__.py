"""Run the demo (`make demo`): two recorded real runs, one healthy and one that collapses because of a mismatch.

Starts the service on its embedded default (SQLite and a folder), logs the runs over HTTP as their trainers would have,
has workers replay a step of each through the engine and torch, asks the doctor which setting is wrong, prints what
happened, and keeps the pages up until Ctrl-C. A second start repeats no work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.children import Child
from examples.demo.errors import DemoError
from examples.demo.probing import complaints, request_probes, running_workers, unfinished_jobs, wait_for_probes
from examples.demo.records import RECORDS
from examples.demo.replay import log_run, missing_steps
from examples.demo.service_child import only_demo_of, running_service
from examples.demo.story import story
from examples.tiny_rl.record import Manifest, RunRecord
from examples.tiny_rl.sglang_sampler import SglangError
from foreshock.client.reader import Reader
from foreshock.commands.queries import find_run
from foreshock.errors import ForeshockError

console = Console(highlight=False)


def main() -> int:
    """Run the demo; return 0 if it is done, 1 with a message after an error, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--once", action="store_true", help="exit after the diagnosis instead of keeping the pages up")
    parser.add_argument(
        "--engine", choices=sorted(RECORDS), default="vllm", help="which recorded runs: what sampled them"
    )
    parser.add_argument("--data", type=Path, default=Path("foreshock-data"), help="where the service keeps its data")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    for name in [name for name in os.environ if name.startswith("FORESHOCK_")]:
        del os.environ[name]  # The demo does not depend on settings of the shell.
    try:
        with only_demo_of(arguments.data.resolve()):
            run_demo(
                [RunRecord(each) for each in RECORDS[arguments.engine]], arguments.data.resolve(), once=arguments.once
            )
    except (DemoError, ForeshockError, SglangError) as error:
        console.print(f"[bold red]The demo stopped:[/] {_plain(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    return 0


def run_demo(records: Sequence[RunRecord], data: Path, *, once: bool) -> None:
    """Run every part of the demo. Raises DemoError."""
    started = time.monotonic()
    manifests = [record.manifest() for record in records]
    console.print("[bold]1. Service[/]  SQLite and a local folder")
    with running_service(data) as (service, url), Reader(url) as reader:
        console.print(f"   ready at {url}, data in {data}", soft_wrap=True)
        console.print("[bold]2. Runs[/]     recorded steps of real training, logged over HTTP")
        log_missing(records, manifests, data, reader, service, url)
        runs = [find_run(reader, manifest.run.key) for manifest in manifests]
        console.print(f"[bold]3. Replay[/]   checkpointed steps through {manifests[0].run.engine.split()[0]} and torch")
        failures = replay(records, manifests, data, reader, service, [run.id for run in runs])
        console.print("[bold]4. What happened[/]")
        for run, manifest in zip(runs, manifests, strict=True):
            for line in story(reader, run, manifest.checkpoints[-1].step):
                console.print(f"   {line}", markup=False, soft_wrap=True)
        console.print(f"[bold]Done[/] in {time.monotonic() - started:.0f} s. Next: foreshock report {runs[-1].key}")
        console.print(f"Pages: {url}", soft_wrap=True)
        if not once:
            keep_up(service, url)
        if failures:
            raise DemoError(f"some replays failed:\n{failures}See {(data / 'worker.log')}.")


def log_missing(
    records: Sequence[RunRecord],
    manifests: Sequence[Manifest],
    data: Path,
    reader: Reader,
    service: Child,
    url: str,
) -> None:
    """Log the steps that the service does not have yet, all runs at the same time."""
    missing = [missing_steps(reader, record, manifest) for record, manifest in zip(records, manifests, strict=True)]
    if not any(missing):
        console.print("   nothing to do: it is stored already")
        return
    with _progress() as progress, ThreadPoolExecutor() as threads:
        task = progress.add_task("logged", total=sum(map(len, missing)), note="")
        logged = [
            threads.submit(
                log_run, record, manifest, steps, url, data / "spool", service, lambda: progress.update(task, advance=1)
            )
            for record, manifest, steps in zip(records, manifests, missing, strict=True)
            if steps
        ]
        for each in logged:
            each.result()


def replay(
    records: Sequence[RunRecord],
    manifests: Sequence[Manifest],
    data: Path,
    reader: Reader,
    service: Child,
    runs: Sequence[str],
) -> str:
    """Run the probes that are not done yet; return one line per replay that failed."""
    probes = [
        probe for run, manifest in zip(runs, manifests, strict=True) for probe in request_probes(reader, run, manifest)
    ]
    total = unfinished_jobs(probes)
    if not total:
        console.print("   nothing to do: it is stored already")
    else:
        with (
            running_workers(reader.connection.url, records, manifests[0], data / "worker.log") as workers,
            _progress() as progress,
        ):
            task = progress.add_task("replayed", total=total, note="engines start, this takes a while")
            probes = wait_for_probes(
                reader,
                probes,
                workers,
                service,
                lambda left: progress.update(task, completed=total - left),
            )
    return "".join(f"    {complaint}\n" for complaint in complaints(probes))


def keep_up(service: Child, page: str) -> None:
    """Keep the service up until Ctrl-C. Raises DemoError if the service ends."""
    with contextlib.suppress(KeyboardInterrupt):
        console.print(f"The pages stay up until Ctrl-C: {page}", soft_wrap=True)
        while True:
            service.require_running()
            time.sleep(0.5)
    console.print("\nStopping.")


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    columns = (
        TextColumn("   {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def _plain(text: str) -> str:
    """Escape text so that rich does not read it as markup."""
    return text.replace("[", "\\[")


def _leave(number: int, _: FrameType | None) -> None:
    """Exit through every `with` block, so that all child processes end."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
