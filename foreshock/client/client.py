"""The client that a trainer holds: every call returns at once, never raises, and is delivered in the background.

    with foreshock.Client(run_key="my-run") as client:
        client.start_run(model="Qwen3-4B", initial_learning_rate=1e-6)
        for step in range(...):
            client.log_rollouts(step, {...})
            client.log_scalars(step, {"grad_norm": 0.3})

What happens to a call: its arrays are copied (`capture.py`) into a bounded queue (`queue.py`); one thread encodes them
(`deliveries.py`) into an outbox (`outbox.py`) that spills to disk (`spool.py`); another sends (`uploader.py`).

Forking: in a forked child the client is switched off (its threads live in the parent) and what is logged there is
counted as dropped. Make a client of its own in each process that logs.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self

from foreshock.client import requests
from foreshock.client.capture import Rollouts, capture_rollouts, size_of
from foreshock.client.checkpoint_requests import WantedWeights
from foreshock.client.connection import ServiceConnection
from foreshock.client.counters import Counters
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.log_once import LogOnce
from foreshock.client.outbox import Outbox
from foreshock.client.queue import BoundedQueue, Work
from foreshock.client.registrar import Registrar
from foreshock.client.settings import ClientSettings, default_attempt_key
from foreshock.client.spool import Spool
from foreshock.client.uploader import Uploader
from foreshock.digests import weights_digest
from foreshock.errors import ConfigurationError, ForeshockError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.attributes import BatchAttributes

__all__ = ["Client"]

Arguments = ParamSpec("Arguments")

_EXTRA_SETTINGS = frozenset(ClientSettings.__slots__) - {"url", "api_key", "spool_directory"}


def _never_raises(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Turn every exception into a counted, once-logged event, unless the client is `strict`."""

    @functools.wraps(method)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        client = arguments[0]
        assert isinstance(client, Client)
        try:
            method(*arguments, **keywords)
        except Exception as error:
            client._note_failure(method.__name__, error)

    return call


class Client:
    """Logs one run to the service. Methods are safe from any thread; none but `flush` and `close` waits.

    Arguments not given come from `FORESHOCK_URL`, `FORESHOCK_API_KEY`, `FORESHOCK_SPOOL_DIRECTORY`,
    `FORESHOCK_RUN_KEY` and `FORESHOCK_ATTEMPT_KEY`. `run_key` is your own lasting name for the run: the same key
    after a restart continues the run as a new attempt. With `strict=True` mistakes in arguments raise, for development.
    `block_when_full` makes calls wait for room instead of dropping, for importers. Further settings are those of
    `ClientSettings`, by name.

    What was lost, kept or refused is in `counters`; see `Counters`.
    """

    def __init__(
        self,
        url: str | None = None,
        project: str = "default",
        run_key: str | None = None,
        *,
        api_key: str | None = None,
        spool_directory: str | os.PathLike[str] | None = None,
        attempt_key: str | None = None,
        strict: bool = False,
        block_when_full: bool = False,
        **settings: Any,
    ) -> None:
        """Nothing is sent until a run is started. Raises ConfigurationError for settings that make no sense."""
        unknown = settings.keys() - _EXTRA_SETTINGS
        if unknown:
            raise ConfigurationError(f"there is no setting {', '.join(sorted(unknown))} of a client")
        self.settings = replace(ClientSettings.resolve(url, api_key, spool_directory), **settings)
        self.project = project
        self.run_key = run_key or os.environ.get("FORESHOCK_RUN_KEY") or f"run-{uuid.uuid4().hex[:12]}"
        self.attempt_key = attempt_key or default_attempt_key()
        self.counters = Counters()
        self._strict = strict
        self._block_when_full = block_when_full
        self._log = LogOnce("foreshock.client")
        self._registrar = Registrar()
        self._registration: Registration | None = None
        self._attributes = BatchAttributes()
        self._closed = False
        self._usable = True
        self._queue = BoundedQueue(max_items=self.settings.max_queue_items, max_bytes=self.settings.max_queue_bytes)
        self._spool = Spool(
            self.settings.spool_directory,
            max_bytes=self.settings.max_spool_bytes,
            max_rejected_bytes=self.settings.max_rejected_bytes,
        )
        outbox = Outbox(
            self._spool, self.counters, max_memory_bytes=self.settings.max_outbox_bytes, warn=self._log.warning
        )
        self._connection = self.new_connection()
        self._wanted = WantedWeights(self._connection, self._registrar)
        self._uploader = Uploader(
            self._connection,
            self._queue,
            outbox,
            self._registrar,
            self.counters,
            self._log,
            after_delivery=self._wanted.after_delivery,
        )
        _open_clients.add(self)
        self._uploader.start()

    @property
    def run_id(self) -> str | None:
        """The run's id at the service, None until the service has been reached."""
        return self._registrar.run_id(self._registration) if self._registration is not None else None

    @property
    def attempt(self) -> int | None:
        """The number of this attempt, None until the service has been reached."""
        return self._registrar.attempt_number(self._registration) if self._registration is not None else None

    @property
    def want_weights_at_step(self) -> int | None:
        """A step whose weights the service would like to be saved and announced with `log_checkpoint`, if any."""
        return self._wanted.step

    def note_wanted_weights(self, step: int | None) -> None:
        """Take an AdviceFeed's word for `want_weights_at_step`."""
        self._wanted.told_by_feed(step)

    def new_connection(self, *, timeout_seconds: float | None = None) -> ServiceConnection:
        """A connection with this client's address and key, for another thread."""
        timeout_seconds = self.settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        return ServiceConnection(self.settings.url, self.settings.api_key, timeout_seconds=timeout_seconds)

    def start_run(
        self,
        *,
        name: str | None = None,
        model: str | None = None,
        trainer: str | None = None,
        engine: str | None = None,
        hardware: str | None = None,
        initial_learning_rate: float | None = None,
        length_cap: int | None = None,
        advice_mode: Literal["shadow", "apply"] = "shadow",
        resume_step: int = 0,
        fingerprint: Fingerprint | Mapping[str, Any] | None = None,
        attributes: BatchAttributes | None = None,
    ) -> Client:
        """Say what the run is; returns the client, for `with client.start_run(...):`.

        `resume_step` is the first step that this attempt computes. `attributes` (sampling defaults, logprobs mode, …)
        go with every batch that has none of its own. Without this call the first thing logged starts the run.
        """
        described = {
            "name": name,
            "model": model,
            "trainer": trainer,
            "engine": engine,
            "hardware": hardware,
            "initial_learning_rate": initial_learning_rate,
            "length_cap": length_cap,
            "advice_mode": advice_mode,
        }
        self._start(described, resume_step, fingerprint, attributes)
        return self

    @_never_raises
    def log_rollouts(
        self,
        step: int,
        rollouts: Rollouts,
        *,
        shard: int = 0,
        shards: int = 1,
        attributes: BatchAttributes | None = None,
        copy: bool = True,
    ) -> None:
        """Log rollouts of a step: all of them, or shard `shard` of `shards` (one per data-parallel rank, say).

        `rollouts` is a RolloutBatch, an Arrow table, or a mapping of columns (the names of the rollout schema, or of
        RolloutBatch's fields). Columns of tokens are flat arrays with `prompt_offsets` and `response_offsets` [N + 1]
        (or `…_lengths` [N]), padded [N, L] arrays with `prompt_padding_mask` and `response_padding_mask`, Arrow lists,
        or lists of one list a rollout. Arrays are numpy, torch on the CPU, or Arrow; `sample_ids` may be left out.
        Arrays are copied before the call returns; `copy=False` skips that where the caller never changes them again.
        """
        registration = self._started()
        requests.check_shard(step, shard, shards)
        what = f"shard {shard} of step {step}"
        size = size_of(rollouts)
        if not self._reserve(what, size):
            return
        try:
            captured = capture_rollouts(
                rollouts,
                default_ids=f"{step}-{shard}",
                attributes=self._attributes if attributes is None else attributes,
                copy=copy,
            )
        except BaseException:
            self._queue.cancel(size)
            raise
        make = functools.partial(requests.rollouts, registration, step, shard, shards, captured.build)
        self._put(Work(what, size, make))

    @_never_raises
    def log_scalars(self, step: int, values: Mapping[str, Any], *, source: str = "trainer") -> None:
        """Log numbers of a step by name (`grad_norm`, `entropy`, …); those that are not finite count as missing."""
        registration = self._started()
        if not len(values):
            return
        delivery = requests.scalars(registration, step, source, values)
        if self._reserve(f"scalars of step {step}", len(delivery.body)):
            self._put(Work(f"scalars of step {step}", len(delivery.body), lambda: delivery))

    @_never_raises
    def log_checkpoint(
        self,
        step: int,
        *,
        root: str,
        path: str,
        digest: str | None = None,
        local_folder: str | os.PathLike[str] | None = None,
        weights_version: int | None = None,
        expires_at_us: int | None = None,
    ) -> None:
        """Announce saved weights: those that sampled and scored `step`, as a Hugging Face folder of safetensors.

        `root` is a name from the workers' configuration, `path` the folder below it. `digest` is
        `foreshock.digests.weights_digest(folder)`; where it is not given it is computed in the background from
        `local_folder`. `expires_at_us` says until when the weights are kept (UTC microseconds).
        """
        registration = self._started()
        if digest is None and local_folder is None:
            raise ConfigurationError("log_checkpoint needs the weights' `digest`, or the `local_folder` they are in")
        what = f"the checkpoint of step {step}"

        def make() -> Delivery:
            of_weights = digest if digest is not None else weights_digest(os.fspath(local_folder or ""))
            return requests.checkpoint(registration, step, root, path, of_weights, weights_version, expires_at_us)

        if not self._reserve(what, 0, needed=True):
            return
        if digest is not None:
            self._put(Work(what, 0, make))
        else:
            # Reading gigabytes of weights must not keep rollouts from being encoded.
            threading.Thread(target=self._make_and_put, args=(what, make), name="foreshock-digest", daemon=True).start()

    @_never_raises
    def acknowledge(self, revision: int, step: int, applied_learning_rate: float) -> None:
        """Tell the service which learning rate was used at `step` under which revision of the advice."""
        registration = self._started()
        delivery = requests.acknowledgement(registration, revision, step, applied_learning_rate)
        if self._reserve("an acknowledgement", len(delivery.body)):
            self._put(Work("an acknowledgement", len(delivery.body), lambda: delivery))

    @_never_raises
    def finish(self, *, failed: bool = False) -> None:
        """Say that the run is over."""
        delivery = requests.state(self._started(), "failed" if failed else "finished")
        if self._reserve("the end of the run", 0, needed=True):
            self._put(Work("the end of the run", 0, lambda: delivery))

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until all that was logged is delivered (or refused for good); whether that was so in time."""
        return self._usable and self._uploader.flush(timeout_seconds)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Deliver what can be delivered in time, leave the rest on disk for the next client, stop. Never raises."""
        if self._closed or not self._usable:
            return
        self._closed = True
        try:
            self._uploader.stop(self.settings.exit_seconds if timeout_seconds is None else timeout_seconds)
            self._spool.close()
            self._connection.close()
        except Exception as error:
            self.counters.add(internal_errors=1)
            self._log.exception("close", "closing the client failed", error)
        _open_clients.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._registration is not None:
            self.finish(failed=error is not None)
        self.close()

    def _start(
        self,
        described: Mapping[str, Any],
        resume_step: int,
        fingerprint: Fingerprint | Mapping[str, Any] | None,
        attributes: BatchAttributes | None,
    ) -> None:
        try:
            registration = requests.registration(
                self.project, self.run_key, described, self.attempt_key, resume_step, fingerprint
            )
            self._attributes = attributes or BatchAttributes()
            cap = described.get("length_cap")
            if self._attributes.length_cap is None and cap is not None:
                self._attributes = replace(self._attributes, length_cap=cap)
            self._register(registration)
        except Exception as error:
            self._note_failure("start_run", error)

    def _register(self, registration: Registration) -> None:
        self._registration = registration
        if self._reserve("the start of the run", 0, needed=True):
            delivery = Delivery("register", registration)
            self._put(Work("the start of the run", 0, lambda: delivery))

    def _started(self) -> Registration:
        if self._registration is None:
            self._register(requests.registration(self.project, self.run_key, {}, self.attempt_key, 0, None))
        assert self._registration is not None
        return self._registration

    def _reserve(self, what: str, size: int, *, needed: bool = False) -> bool:
        if not self._usable or self._closed:
            self.counters.add(dropped_closed=1, dropped_bytes=size)
            self._log.warning("closed", f"{what} was logged after the client was closed or its process forked: dropped")
            return False
        wait = threading.TIMEOUT_MAX if self._block_when_full else 0.0
        if self._queue.reserve(size, needed=needed, wait_seconds=wait):
            return True
        self.counters.add(dropped_queue_full=1, dropped_bytes=size)
        self._log.warning("queue full", f"{what} is dropped: more is logged than can be encoded; see client.counters")
        return False

    def _put(self, work: Work) -> None:
        self.counters.add(accepted=1)
        self._queue.put(work)

    def _make_and_put(self, what: str, make: Callable[[], Delivery]) -> None:
        try:
            delivery = make()
        except Exception as error:
            self._queue.cancel(0)
            self.counters.add(invalid=1)
            self._log.warning(f"invalid {what}", f"{what} is not announced: {error}")
        else:
            self._put(Work(what, 0, lambda: delivery))

    def _note_failure(self, name: str, error: Exception) -> None:
        wrong_argument = isinstance(error, ForeshockError | ValueError | TypeError)
        if self._strict:
            raise error
        if wrong_argument:
            self.counters.add(invalid=1)
            self._log.warning(f"invalid {name}", f"{name} is left out: {error}")
        else:
            self.counters.add(internal_errors=1)
            self._log.exception(f"failed {name} {type(error).__name__}", f"{name} failed, and is left out", error)

    def _after_fork_in_child(self) -> None:
        self._usable = False
        self.counters.forget_locks()
        self._spool.forget_locks()


_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for client in list(_open_clients):
        client.close()


def _switch_off_all() -> None:
    for client in list(_open_clients):
        client._after_fork_in_child()


os.register_at_fork(after_in_child=_switch_off_all)
