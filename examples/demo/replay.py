"""Log a recorded run over HTTP as its trainer would have: step by step, polling the advice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from examples.demo.children import Child
from examples.demo.errors import DemoError
from examples.tiny_rl.record import Manifest, RunRecord
from examples.tiny_rl.run_log import start_run
from examples.tiny_rl.tokenizer import TOKENIZER
from foreshock import AdviceFeed, Client
from foreshock.client.reader import Reader
from foreshock.commands.queries import find_run
from foreshock.errors import RunNotFound

STEPS_AHEAD = 8
"""Steps that logging may be ahead of measuring, so that the advice is that of the step."""
PATIENCE_SECONDS = 120.0


def missing_steps(reader: Reader, record: RunRecord, manifest: Manifest) -> list[int]:
    """Return the recorded steps that the service does not have yet, ascending; all of them if it has no such run."""
    try:
        run = find_run(reader, manifest.run.key)
    except RunNotFound:
        return record.steps()
    stored = {step.step for step in reader.steps(run.id) if step.closed}
    announced = {each.step for each in reader.checkpoints(run.id)}
    lacking = {checkpoint.step for checkpoint in manifest.checkpoints} - announced
    return [step for step in record.steps() if step not in stored or step in lacking]


def log_run(
    record: RunRecord,
    manifest: Manifest,
    steps: list[int],
    url: str,
    spool: Path,
    service: Child,
    report: Callable[[], None],
) -> None:
    """Log `steps` and call `report` after each.

    Raises DemoError if the service does not accept everything.
    """
    attempt = manifest.attempts[-1]
    scalars = record.scalars()
    checkpoints = {checkpoint.step: checkpoint for checkpoint in manifest.checkpoints}
    with Client(url, run_key=manifest.run.key, attempt_key=attempt.key, spool_directory=spool, strict=True) as client:
        # Recorded steps cannot follow an advice: in shadow mode it is shown, and the trainer keeps its rate.
        fingerprint = {"tokenizer": TOKENIZER, **manifest.fingerprints()}
        start_run(client, manifest.run, attempt, fingerprint, advice_mode="shadow")
        with AdviceFeed(client) as feed:
            for number, step in enumerate(steps):
                if step in checkpoints:
                    of_step = checkpoints[step]
                    client.log_checkpoint(
                        step, root=manifest.run.key, path=of_step.path, digest=of_step.digest, weights_version=step
                    )
                feed.scale(step)
                client.log_scalars(step, scalars[step])
                client.log_rollouts(step, record.rollouts(step))
                feed.acknowledge(step, scalars[step]["lr"])
                report()
                if (number + 1) % STEPS_AHEAD == 0:
                    _deliver(client, service)
            client.finish()
            _deliver(client, service)


def _deliver(client: Client, service: Child) -> None:
    """Wait until everything logged is stored and measured."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while client.flush(1.0).undelivered:
        service.require_running()
        if time.monotonic() > deadline:
            raise DemoError(f"the service did not accept the run in time: {client.counters!r}{service.log_tail()}")
    if client.counters.rejected or client.counters.dropped:
        raise DemoError(f"the service did not accept everything: {client.counters!r}{service.log_tail()}")
