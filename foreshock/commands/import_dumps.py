"""The part of `foreshock import` that reads a framework's dumps, once or as they appear."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreshock.client.client import Client
from foreshock.client.connection import run_url
from foreshock.client.reader import Reader
from foreshock.commands.option_types import SECONDS
from foreshock.commands.queries import find_run
from foreshock.commands.text import Progress
from foreshock.diagnosis.quantities import recognised
from foreshock.diagnosis.wording import names_read, plural
from foreshock.errors import ConfigurationError, Rejected, RolloutsError, ServiceError, ServiceUnavailable
from foreshock.importers import FORMATS, Dump, DumpFormat, ImportedStep, ReadOptions, formats_of
from foreshock.importers.texts import lacks_tokens
from foreshock.rollouts.attributes import LOGPROBS_MODES, TRAINER_POLICIES, BatchAttributes

_POLL_SECONDS = 0.5
_STALLED_SECONDS = 120.0
_Files = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file of a dump."""


def add_dump_options(parser: argparse.ArgumentParser) -> None:
    group = add_format_options(parser)
    group.add_argument(
        "--follow", action="store_true", help="import the dumps of folder PATH as they appear, until Ctrl-C"
    )
    group.add_argument(
        "--until-idle", type=SECONDS, metavar="SECONDS", help="end --follow after a time without a new dump"
    )
    group.add_argument(
        "--settle", type=SECONDS, default=5.0, metavar="SECONDS",
        help="--follow: time without a change after which a file without a marker is finished (default: 5)",
    )  # fmt: skip


def add_format_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("dumps of a framework (docs/integrations.md)")
    group.add_argument("--format", choices=[*FORMATS], help="the format of PATH (default: told from its files)")
    group.add_argument(
        "--allow-pickle", action="store_true", help="read .pt and .pkl files: only their tensors and plain data"
    )
    group.add_argument("--reward-key", metavar="NAME", help="the entry of rewards that are mappings")
    return group


def read_options(arguments: argparse.Namespace, attributes: BatchAttributes) -> ReadOptions:
    renamed = dict(getattr(arguments, "map", ()))
    return ReadOptions(arguments.allow_pickle, arguments.reward_key, attributes, renamed=renamed)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling of all rollouts (for JSON lines, which do not contain it)")
    for name in ("temperature", "top-p", "min-p"):
        sampling.add_argument(f"--{name}", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--logprobs-mode", choices=LOGPROBS_MODES)
    sampling.add_argument("--trainer-policy", choices=TRAINER_POLICIES)


def sampling_attributes(arguments: argparse.Namespace, length_cap: int | None = None) -> BatchAttributes:
    """Return the attributes of `add_sampling_options`. Raises ConfigurationError for an invalid value."""
    names = ("temperature", "top_p", "top_k", "min_p", "logprobs_mode", "trainer_policy")
    return BatchAttributes(length_cap=length_cap, **{name: getattr(arguments, name) for name in names})


def chosen_format(arguments: argparse.Namespace) -> DumpFormat | None:
    """Return the format of the paths; None for recorded runs. Raises ConfigurationError."""
    follow = getattr(arguments, "follow", False)
    if not follow and getattr(arguments, "until_idle", None) is not None:
        raise ConfigurationError("--until-idle needs --follow")
    name = arguments.format
    for path in arguments.paths if name is None else ():
        if (reason := lacks_tokens(path)) is not None:
            raise ConfigurationError(f"{str(path)!r}: {reason}")
    if name is None and (follow or len(arguments.paths) == 1):
        found = formats_of(arguments.paths[0])
        if follow and len(found) != 1:
            raise ConfigurationError(
                f"{str(arguments.paths[0])!r} has files of {', '.join(found) or 'no known format'}: pass --format, one "
                f"of {', '.join(FORMATS)}"
            )
        name = found[0] if len(found) == 1 else None
    if name is None:
        return None
    if len(arguments.paths) != 1:
        raise ConfigurationError(f"--format {name} reads one PATH, got {len(arguments.paths)}")
    if arguments.format is None:
        print(f"format: {name}", file=sys.stderr)
    return FORMATS[name]


def import_dumps(
    client: Client,
    reader: Reader,
    kind: DumpFormat,
    options: ReadOptions,
    arguments: argparse.Namespace,
    start: Callable[[], None],
) -> int:
    """Import the dumps with a client, and close it. Raises ForeshockError, and marks the run as failed then.

    `start` starts its run: with --follow at once, else after the first dump was read.
    """
    importing = _Importing(client, kind, options, arguments, start)
    try:
        status = importing.follow() if arguments.follow else importing.once()
        if not arguments.unfinished and not importing.interrupted:
            client.finish()
            _wait_for_delivery(client)
    except BaseException:
        if not arguments.unfinished:
            _fail_run(client, reader)
        raise
    finally:
        client.close()
        if importing.is_started:
            importing.summarise(reader)
    return status


@dataclass
class _Importing:
    """One import: what was logged, and the remarks that were already printed."""

    client: Client
    kind: DumpFormat
    options: ReadOptions
    arguments: argparse.Namespace
    start: Callable[[], None]
    is_started: bool = False
    interrupted: bool = False
    remarks: set[str] = field(default_factory=set)
    steps: list[int] = field(default_factory=list)
    rollouts: int = 0
    names: set[str] = field(default_factory=set)
    lost: int = 0

    def __post_init__(self) -> None:
        self.path: Path = self.arguments.paths[0]

    def once(self) -> int:
        """Import the finished dumps. Raises RolloutsError if one is invalid, ConfigurationError if none is finished."""
        for dump in self.kind.find(self.path):
            if dump.finished is False:
                self._remark(
                    f"step {dump.step} is not finished (no STABLE file) and was left out; use --follow to wait"
                )
                continue
            self._log(self.kind.read(dump, self.options))
        if not self.is_started:
            raise ConfigurationError(f"no dump in {str(self.path)!r} is finished")
        _wait_for_delivery(self.client)
        return 0

    def follow(self) -> int:
        """Import dumps as they appear, until Ctrl-C, SIGTERM or --until-idle. Returns 1 if some were not imported."""
        self._start_run()
        # The files of each step: as they were seen last and since when, and those that were imported or refused.
        seen: dict[int, tuple[_Files, float]] = {}
        done: dict[int, _Files] = {}
        refused: dict[int, _Files] = {}
        newest = time.monotonic()
        with _interruptible():
            try:
                while self.arguments.until_idle is None or time.monotonic() - newest < self.arguments.until_idle:
                    for dump, files in self._finished(seen):
                        if dump.step in done or refused.get(dump.step) == files:
                            continue
                        try:
                            self._log(self.kind.read(dump, self.options))
                            self._deliver()
                        except (RolloutsError, Rejected) as error:
                            # Such as a half-written file: it is read again when it has changed.
                            self._remark(f"step {dump.step} was not imported: {error}")
                            refused[dump.step] = files
                        else:
                            refused.pop(dump.step, None)
                            done[dump.step] = files
                        newest = time.monotonic()
                    time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                self.interrupted = True
                print("stopped; the same command continues here", file=sys.stderr)
        waiting = sorted(seen.keys() - done.keys() - refused.keys())
        for step in waiting:
            self._remark(f"step {step} was not imported: it is not finished")
        for step in sorted(step for step, files in done.items() if seen[step][0] != files):
            self._remark(f"the files of step {step} changed after it was imported; the service keeps the first content")
        return 1 if refused or (waiting and not self.interrupted) else 0

    def _finished(self, seen: dict[int, tuple[_Files, float]]) -> Iterator[tuple[Dump, _Files]]:
        """Yield the dumps with their marker; those without one if their files have not changed for `--settle`."""
        for dump in self.kind.find(self.path) if self.path.exists() else ():
            try:
                files = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in dump.files)
            except OSError:
                # The trainer moved or removed it meanwhile.
                continue
            if dump.step not in seen or seen[dump.step][0] != files:
                seen[dump.step] = files, time.monotonic()
            settled = time.monotonic() - seen[dump.step][1] >= self.arguments.settle
            if not dump.missing and (settled if dump.finished is None else dump.finished):
                yield dump, files

    def summarise(self, reader: Reader) -> None:
        known = self.client.counters.duplicates
        steps = plural(len(self.steps), "step")
        if self.steps:
            first, last = self.steps[0], self.steps[-1]
            steps += f" ({first})" if len(self.steps) == 1 else f" ({first} to {last})"
        already = f", {plural(known, 'shard')} of them already stored" if known else ""
        url = run_url(reader.connection.url, self.client.project, self.client.run_key)
        if self.names:
            print("\n".join(names_read("scalars of the dumps", *recognised(self.names))))
        print(f"{steps} with {plural(self.rollouts, 'rollout')} imported{already}; run {self.client.run_id}: {url}")

    def _start_run(self) -> None:
        if not self.is_started:
            self.start()
            self.is_started = True

    def _log(self, step: ImportedStep) -> None:
        self._start_run()
        for note in step.notes:
            self._remark(note)
        for count, sentence in step.left_out:
            self._remark(f"step {step.step}: {sentence}")
            self.client.note_left_out(count, f"step {step.step}: {sentence}")
        for shard, batch in enumerate(step.batches):
            self.client.log_rollouts(step.step, batch, shard=shard, shards=len(step.batches), copy=False)
        self.names |= step.scalars.keys()
        if step.scalars:
            self.client.log_scalars(step.step, step.scalars)
        rollouts = sum(batch.num_rollouts for batch in step.batches)
        tokens = sum(batch.num_tokens for batch in step.batches)
        self.steps.append(step.step)
        self.rollouts += rollouts
        scalars = f", {plural(len(step.scalars), 'scalar')}" if step.scalars else ""
        print(f"step {step.step}: {plural(rollouts, 'rollout')}, {plural(tokens, 'token')}{scalars}", flush=True)

    def _deliver(self) -> None:
        """Wait for the service, however long it takes. Raises Rejected for items of this step."""
        while (status := self.client.flush(2.0)).undelivered:
            self._remark(f"waiting for the service: {status.reason or 'no answer yet'}")
        lost = _losses_of(self.client)
        if lost > self.lost:
            self.lost = lost
            _refuse_losses(self.client)

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.add(text)
            print(f"note: {text}", file=sys.stderr, flush=True)


def _wait_for_delivery(client: Client) -> None:
    """Wait until everything is delivered. Raises ServiceUnavailable if it stalls, Rejected for rejected items."""
    progress = Progress("delivering", client.counters.accepted)
    delivered, since = -1, time.monotonic()
    while (status := client.flush(0.2)).undelivered:
        now = client.counters.delivered
        progress.show(now)
        if now != delivered:
            delivered = now
            since = time.monotonic()
        elif time.monotonic() - since > _STALLED_SECONDS:
            raise ServiceUnavailable(
                f"nothing was delivered for {_STALLED_SECONDS:.0f} s ({status.reason or 'no answer'}); the rest is "
                f"kept in {client.settings.spool_directory} and sent by the next import"
            )
    progress.show(client.counters.delivered)
    _refuse_losses(client)


def _losses_of(client: Client) -> int:
    """Return the number of items that were rejected, dropped, or could not be encoded.

    Rollouts that were left out of a shard are none: the service is told of them, and their shard has arrived.
    """
    now = client.counters.snapshot()
    return int(now.rejected + now.invalid - now.left_out + now.dropped)


def _refuse_losses(client: Client) -> None:
    """Raise Rejected if the service rejected items, or the client dropped some or could not encode them."""
    now = client.counters.snapshot()
    if _losses_of(client):
        kept = client.settings.spool_directory / "*.rejected"
        raise Rejected(
            f"{plural(now.rejected, 'item')} rejected by the service ({kept}), {now.invalid} invalid, "
            f"{now.dropped} dropped"
        )


def _fail_run(client: Client, reader: Reader) -> None:
    """Mark the run as failed, unless it had ended before."""
    if client.newest_step < 0:
        return
    client.flush(client.settings.exit_seconds)
    with suppress(ServiceError):
        if client.run_id is not None and find_run(reader, client.run_id).state in ("running", "stale"):
            client.finish(failed=True)
            print(
                f"note: the run {client.run_key} is marked as failed; the same command continues it: what is stored is "
                "not sent again",
                file=sys.stderr,
            )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
