"""Run the demo (`make demo`): Foreshock on a recorded real run, in a few minutes.

Starts the service on its embedded default (SQLite and a folder), logs a recorded run over HTTP as its trainer would
have, starts two workers that replay checkpointed steps through vLLM and torch, prints the diagnosis, and keeps the
pages up until Ctrl-C. A second start repeats no work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.children import Child
from examples.demo.errors import DemoError
from examples.demo.probing import complaints, request_probes, running_workers, unfinished_jobs, wait_for_probes
from examples.demo.replay import log_run, missing_steps
from examples.demo.service_child import only_demo_of, running_service
from examples.tiny_rl.record import RECORDED, RECORDED_OF_SGLANG, Manifest, RunRecord
from examples.tiny_rl.sglang_sampler import SglangError
from foreshock.client.reader import Reader
from foreshock.commands.main import main as foreshock_command
from foreshock.commands.queries import find_run
from foreshock.errors import ForeshockError

console = Console(highlight=False)
RECORDS = {"vllm": RECORDED, "sglang": RECORDED_OF_SGLANG}


def main() -> int:
    """Run the demo; return 0 if it is done, 1 with a message after an error, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--once", action="store_true", help="exit after the diagnosis instead of keeping the pages up")
    parser.add_argument("--engine", choices=sorted(RECORDS), default="vllm", help="which recorded run: what sampled it")
    parser.add_argument("--data", type=Path, default=Path("foreshock-data"), help="where the service keeps its data")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    for name in [name for name in os.environ if name.startswith("FORESHOCK_")]:
        del os.environ[name]  # The demo does not depend on settings of the shell.
    try:
        with only_demo_of(arguments.data.resolve()):
            run_demo(RunRecord(RECORDS[arguments.engine]), arguments.data.resolve(), once=arguments.once)
    except (DemoError, ForeshockError, SglangError) as error:
        console.print(f"[bold red]The demo stopped:[/] {_plain(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    return 0


def run_demo(record: RunRecord, data: Path, *, once: bool) -> None:
    """Run every part of the demo. Raises DemoError."""
    started = time.monotonic()
    manifest = record.manifest()
    console.print("[bold]1. Service[/]  SQLite and a local folder")
    with running_service(data) as (service, url), Reader(url) as reader:
        console.print(f"   ready at {url}, data in {data}", soft_wrap=True)
        console.print(f"[bold]2. Run[/]      {_plain(manifest.run.name)}: {manifest.steps} recorded steps, over HTTP")
        log_missing(record, manifest, data, reader, service, url)
        run = find_run(reader, manifest.run.key)
        console.print(f"[bold]3. Replay[/]   checkpointed steps through {manifest.run.engine.split()[0]} and torch")
        failures = replay(record, manifest, data, reader, service, run.id)
        console.print("[bold]4. Diagnosis[/]\n")
        if foreshock_command(["report", run.id, "--full", "--fail-on", "never", "--url", url]):
            raise DemoError("the report failed; its message is above")
        console.print(f"\n[bold]Done[/] in {time.monotonic() - started:.0f} s.")
        if not once:
            keep_up(service, f"{url}/runs/{run.id}")
        if failures:
            raise DemoError(f"some replays failed:\n{failures}See {(data / 'worker.log')}.")


def log_missing(record: RunRecord, manifest: Manifest, data: Path, reader: Reader, service: Child, url: str) -> None:
    """Log the steps that the service does not have yet."""
    steps = missing_steps(reader, record, manifest)
    if not steps:
        console.print("   nothing to do: it is stored already")
        return
    with _progress() as progress:
        task = progress.add_task("logged", total=len(steps), note="")

        def report(step: int, scale: float) -> None:
            progress.update(task, advance=1, note=f"step {step}, advised learning-rate scale {scale:g}")

        log_run(record, manifest, steps, url, data / "spool", service, report)


def replay(record: RunRecord, manifest: Manifest, data: Path, reader: Reader, service: Child, run: str) -> str:
    """Run the probes that are not done yet; return one line per replay that failed."""
    probes = request_probes(reader, run, manifest)
    total = unfinished_jobs(probes)
    if not total:
        console.print("   nothing to do: it is stored already")
    else:
        with (
            running_workers(reader.connection.url, record, manifest, data / "worker.log") as workers,
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
