"""Request probes of the checkpointed steps, run a worker for them, and wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from examples.demo.children import Child
from examples.demo.errors import DemoError
from examples.tiny_rl.record import Manifest, RunRecord
from examples.tiny_rl.run_log import WEIGHTS_ROOT
from examples.tiny_rl.sglang_sampler import IN_BFLOAT16, running_sglang
from foreshock.client.reader import Reader
from foreshock.commands.queries import RunQueries
from foreshock.scorers import SCORERS, VARIANTS, default_scorers

WORKER_IDLE_SECONDS = 90
"""Longer than a lease: the job of a killed worker is queued again only when its lease expires."""
PATIENCE_SECONDS = 900.0

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
    """Request one exact probe per checkpoint; a probe that was requested before is returned with its state."""
    return [
        reader.connection.decoded(
            reader.connection.request(
                "POST",
                f"/v1/runs/{run}/probes",
                json_body={
                    "step": checkpoint.step,
                    "scorers": probe_scorers(manifest),
                    "kind": "exact",
                    "options": manifest.scorer_options,
                },
            )
        )
        for checkpoint in manifest.checkpoints
    ]


def unfinished_jobs(probes: list[dict[str, Any]]) -> int:
    """Return the number of jobs of `probes` that have not ended."""
    return sum(job["state"] not in FINAL_STATES for probe in probes for job in probe["jobs"])


@contextlib.contextmanager
def running_worker(url: str, record: RunRecord, manifest: Manifest, log: Path) -> Iterator[Child]:
    """Yield a worker that can read the record's weights, with an SGLang server beside it if the run needs one."""
    environment = {"FORESHOCK_WEIGHTS_ROOTS": f"{WEIGHTS_ROOT}={record.folder.resolve()}"}
    arguments = ["worker", "--url", url, "--until-idle", str(WORKER_IDLE_SECONDS)]
    with contextlib.ExitStack() as servers:
        if manifest.engine_fingerprint["engine"] == "sglang":
            weights = record.folder / manifest.checkpoints[0].path
            server = servers.enter_context(running_sglang(weights, log.with_name("sglang.log"), *IN_BFLOAT16))
            environment |= {
                "FORESHOCK_ENGINE_SERVERS": f"sglang={server.base_url}",
                "FORESHOCK_ENGINE_SERVERS_RELOAD": "sglang",
            }
        yield servers.enter_context(Child("worker", arguments, environment, log))


def wait_for_probes(
    reader: Reader,
    probes: list[dict[str, Any]],
    worker: Child,
    service: Child,
    report: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Wait until all probes have ended and return them; call `report(unfinished jobs)` meanwhile.

    The attributions of their steps are stored then.

    Raises DemoError if the service or the worker ends before that, or after `PATIENCE_SECONDS`.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := unfinished_jobs(probes):
        report(left)
        service.require_running()
        worker.require_running()
        if time.monotonic() > deadline:
            raise DemoError(f"{left} replays are not done after {PATIENCE_SECONDS:.0f} s.{worker.log_tail()}")
        time.sleep(0.3)
        probes = [reader.connection.get_json(f"/v1/probes/{probe['id']}") for probe in probes]
    for probe in probes:
        RunQueries(reader, probe["run"]).wait_for_attribution(probe["step"])
    report(0)
    return probes


def complaints(probes: list[dict[str, Any]]) -> list[str]:
    """Return one line per replay that failed, with its reason; empty if all are done."""
    return [
        f"replay of step {probe['step']} through {job['engine']}: {job['state']}: {job['reason']}"
        for probe in probes
        for job in probe["jobs"]
        if job["state"] != "done"
    ]
