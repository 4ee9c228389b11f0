"""Log a run to a record on disk and, if a URL is given, to a Foreshock service.

The service also advises the scale of the learning rate; without a service the scale is 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from examples.tiny_rl.record import Attempt, RunDescription, RunRecord
from foreshock import AdviceFeed, Client
from foreshock.learning_rate.modes import AdviceMode
from foreshock.rollouts import RolloutBatch

WEIGHTS_ROOT = "tiny-rl"
"""Name of the weights root in a worker's configuration: FORESHOCK_WEIGHTS_ROOTS='tiny-rl=/path/of/the/record'."""


class RunLog(Protocol):
    """The interface that the training loop uses."""

    def scale(self, step: int) -> float:
        """Return the advised factor of the learning rate for a step."""

    def log_step(self, step: int, batch: RolloutBatch, scalars: Mapping[str, float]) -> None:
        """Log all rollouts of a step and the trainer's scalars."""

    def log_checkpoint(self, step: int, weights: Path) -> None:
        """Keep the weights that sample and score `step`."""


class RecordLog:
    """A run logged to disk only."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def scale(self, step: int) -> float:
        return 1.0

    def log_step(self, step: int, batch: RolloutBatch, scalars: Mapping[str, float]) -> None:
        self.record.write_step(step, batch, scalars)

    def log_checkpoint(self, step: int, weights: Path) -> None:
        self.record.write_checkpoint(step, weights)


class ServiceLog:
    """A run logged to disk and to a service; the advice of the service is applied."""

    def __init__(self, record: RunRecord, client: Client, feed: AdviceFeed) -> None:
        self._to_disk = RecordLog(record)
        self._client = client
        self._feed = feed
        self._scale = 1.0

    def scale(self, step: int) -> float:
        self._scale = self._feed.scale(step)
        return self._scale

    def log_step(self, step: int, batch: RolloutBatch, scalars: Mapping[str, float]) -> None:
        self._to_disk.log_step(step, batch, scalars)
        self._client.log_rollouts(step, batch)
        self._client.log_scalars(step, scalars)
        self._feed.acknowledge(step, scalars["lr"], self._scale)

    def log_checkpoint(self, step: int, weights: Path) -> None:
        folder = self._to_disk.record.write_checkpoint(step, weights)
        path = str(folder.relative_to(self._to_disk.record.folder))
        self._client.log_checkpoint(step, root=WEIGHTS_ROOT, path=path, local_folder=folder, weights_version=step)


@contextlib.contextmanager
def open_run_log(record: RunRecord, description: RunDescription, attempt: Attempt, url: str | None) -> Iterator[RunLog]:
    """Open the log of one run; on exit the run is marked as finished in the service."""
    if url is None:
        yield RecordLog(record)
        return
    spool = record.folder / "spool"
    with Client(url=url, run_key=description.key, attempt_key=attempt.key, spool_directory=spool) as client:
        start_run(client, description, attempt)
        with AdviceFeed(client) as feed:
            yield ServiceLog(record, client, feed)
        client.flush(60.0)


def start_run(
    client: Client,
    description: RunDescription,
    attempt: Attempt,
    fingerprint: Mapping[str, Any] | None = None,
    advice_mode: AdviceMode = "apply",
) -> None:
    """Register the run with its description.

    `fingerprint` has those of the logged scores by name, for batches that do not carry them, and the tokenizer's name.
    """
    client.start_run(
        name=description.name,
        model=description.model,
        trainer=description.trainer,
        engine=description.engine,
        hardware=description.hardware,
        initial_learning_rate=description.initial_learning_rate,
        length_cap=description.length_cap,
        advice_mode=advice_mode,
        resume_step=attempt.resume_step,
        fingerprint=fingerprint,
    )
