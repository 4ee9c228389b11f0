"""Request probes of the checkpointed steps, run a worker for them, and wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.demo.children import Child
from examples.demo.errors import DemoError
from examples.tiny_rl.record import Manifest, RunRecord
from examples.tiny_rl.run_log import WEIGHTS_ROOT
from foreshock.client.connection import ServiceConnection
from foreshock.commands.queries import RunQueries
from foreshock.scorers import SCORERS, VARIANTS, default_scorers

PROBE_SCORERS = tuple(
    (name, variant)
    for name in default_scorers()
    for variant in (VARIANTS if SCORERS[name].place is not None else ("",))
)
"""Scorers and variants: the default probe, and the noise floor of each scorer of the chain."""
WORKER_IDLE_SECONDS = 90
"""Longer than a lease: the job of a killed worker is queued again only when its lease expires."""
PATIENCE_SECONDS = 900.0

FINAL_STATES = frozenset({"done", "failed", "skipped"})


def request_probes(connection: ServiceConnection, run: str, manifest: Manifest) -> list[dict[str, Any]]:
    """Request one exact probe per checkpoint; a probe that was requested before is returned with its state."""
    return [
        connection.decoded(
            connection.request(
                "POST",
                f"/v1/runs/{run}/probes",
                json_body={
                    "step": checkpoint.step,
                    "scorers": [{"scorer": scorer, "variant": variant} for scorer, variant in PROBE_SCORERS],
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


def start_worker(url: str, record: RunRecord, log: Path) -> Child:
    """Start a worker that can read the record's weights; leaving its context ends it."""
    environment = {"FORESHOCK_WEIGHTS_ROOTS": f"{WEIGHTS_ROOT}={record.folder.resolve()}"}
    arguments = ["worker", "--url", url, "--until-idle", str(WORKER_IDLE_SECONDS)]
    return Child("worker", arguments, environment, log)


def wait_for_probes(
    connection: ServiceConnection,
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
        probes = [connection.get_json(f"/v1/probes/{probe['id']}") for probe in probes]
    for probe in probes:
        RunQueries(connection, probe["run"]).wait_for_attribution(probe["step"])
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
