"""Request probes of the checkpointed steps, run workers for them, and wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.demo.children import Child
from examples.demo.errors import DemoError
from examples.tiny_rl.record import Manifest, RunRecord
from examples.tiny_rl.sglang_sampler import IN_BFLOAT16, running_sglang
from foreshock.client.reader import Reader
from foreshock.commands.queries import wait_for_attribution
from foreshock.scorers import SCORERS, VARIANTS, default_scorers

PATIENCE_SECONDS = 900.0
SETTLED_SECONDS = 8.0
"""Longer than the service's pause between two looks at what is due."""
DOCTOR_SECONDS = 240.0
"""Enough for a slow machine: the search is complete after about a minute on two cores."""
WORKER_IDLE_SECONDS = PATIENCE_SECONDS
"""One worker may wait for as long as the other works. The workers of a demo that was killed exit after this."""

FINAL_STATES = frozenset({"done", "failed", "skipped"})


def probe_scorers(manifest: Manifest) -> list[dict[str, str]]:
    """Return scorers and variants: the default probe, and the noise floor of each scorer of the chain.

    An engine that no probe asks for by default takes the place of the default one, with all that it can do.
    """
    engine, names = manifest.engine_fingerprint["engine"], default_scorers()
    if not any(name.startswith(f"{engine}.") for name in names):
        own = (name for name, scorer in SCORERS.items() if name.startswith(f"{engine}.") and scorer.side == "engine")
        names = (*own, *(name for name in names if SCORERS[name].side != "engine"))
    return [
        {"scorer": name, "variant": variant}
        for name in names
        for variant in (VARIANTS if SCORERS[name].place is not None else ("",))
    ]


def request_probes(reader: Reader, run: str, manifest: Manifest) -> list[dict[str, Any]]:
    """Request an exact probe of the newest checkpoint, and the doctor if the run is not healthy.

    A probe that was requested before is returned with its state.
    """
    step = manifest.checkpoints[-1].step
    exact = {
        "step": step,
        "scorers": probe_scorers(manifest),
        "kind": "exact",
        "options": manifest.scorer_options,
    }
    doctor = {"step": step, "kind": "doctor", "budget_seconds": DOCTOR_SECONDS}
    wanted = [exact] if reader.diagnosis(run).verdict == "healthy" else [exact, doctor]
    return [
        reader.connection.decoded(reader.connection.request("POST", f"/v1/runs/{run}/probes", json_body=body))
        for body in wanted
    ]


def unfinished_jobs(probes: list[dict[str, Any]]) -> int:
    """Return the number of jobs of `probes` that have not ended."""
    return sum(job["state"] not in FINAL_STATES for probe in probes for job in probe["jobs"])


@contextlib.contextmanager
def running_workers(
    url: str, records: Sequence[RunRecord], manifest: Manifest, log: Path
) -> Iterator[tuple[Child, ...]]:
    """Yield a worker for the engine's scorers and one for torch's, side by side: both can read the records' weights.

    An SGLang server runs beside them if the run needs one.
    """
    roots = ",".join(f"{record.manifest().run.key}={record.folder.resolve()}" for record in records)
    environment = {"FORESHOCK_WEIGHTS_ROOTS": roots}
    scorers = sorted({scorer["scorer"] for scorer in probe_scorers(manifest)})
    with contextlib.ExitStack() as children:
        if manifest.engine_fingerprint["engine"] == "sglang":
            weights = records[0].folder / manifest.checkpoints[0].path
            server = children.enter_context(running_sglang(weights, log.with_name("sglang.log"), *IN_BFLOAT16))
            environment |= {
                "FORESHOCK_ENGINE_SERVERS": f"sglang={server.base_url}",
                "FORESHOCK_ENGINE_SERVERS_RELOAD": "sglang",
            }
        workers = []
        for side in ("engine", "trainer"):
            own = ",".join(name for name in scorers if (SCORERS[name].side == "engine") == (side == "engine"))
            arguments = ["worker", "--url", url, "--until-idle", f"{WORKER_IDLE_SECONDS:g}", "--scorers", own]
            workers.append(children.enter_context(Child(f"{side}'s worker", arguments, environment, log)))
        yield tuple(workers)


def wait_for_probes(
    reader: Reader,
    probes: list[dict[str, Any]],
    workers: Sequence[Child],
    service: Child,
    report: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Wait until all probes have ended and return them; call `report(unfinished jobs)` meanwhile.

    The attributions of their steps are stored then.

    Raises DemoError if the service or a worker ends before that, or after `PATIENCE_SECONDS`.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := unfinished_jobs(probes):
        report(left)
        service.require_running()
        for worker in workers:
            worker.require_running()
        if time.monotonic() > deadline:
            raise DemoError(f"{left} replays are not done after {PATIENCE_SECONDS:.0f} s.{workers[0].log_tail()}")
        time.sleep(0.3)
        probes = [reader.connection.get_json(f"/v1/probes/{probe['id']}") for probe in probes]
    for probe in (each for each in probes if each["kind"] == "exact"):
        wait_for_attribution(reader, probe["run"], probe["step"])
    _wait_until_settled(reader, sorted({probe["run"] for probe in probes}), deadline)
    report(0)
    return probes


def _wait_until_settled(reader: Reader, runs: Sequence[str], deadline: float) -> None:
    """Wait until no diagnosis has changed for some seconds: the service reads findings again in the background."""
    revisions, since = [-1], time.monotonic()
    while time.monotonic() < min(since + SETTLED_SECONDS, deadline):
        if (newest := [reader.diagnosis(run).revision for run in runs]) != revisions:
            revisions, since = newest, time.monotonic()
        time.sleep(0.5)


def complaints(probes: list[dict[str, Any]]) -> list[str]:
    """Return one line per replay that failed, with its reason; empty if all are done."""
    return [
        f"replay of step {probe['step']} through {job['engine']}: {job['state']}: {job['reason']}"
        for probe in probes
        for job in probe["jobs"]
        if job["state"] != "done"
    ]
