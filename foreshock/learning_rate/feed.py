"""The feed: polls the advice in a background thread, and answers `scale(step)` from what it holds, without waiting.

One process asks (the driver, or rank 0) and hands the number on in what it already broadcasts: the feed never starts a
collective. When the service is away the last answer's schedule goes on being evaluated for each new step.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from foreshock.client.connection import ServiceConnection
from foreshock.client.log_once import LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.errors import ConfigurationError, ServiceError
from foreshock.learning_rate.advice import Advice, AdviceAlert

if TYPE_CHECKING:
    from foreshock.client.client import Client

__all__ = ["AdviceFeed"]

_SHORTEST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_LEAST_SECONDS_BETWEEN_POLLS = 0.2
_KEPT_ACKNOWLEDGEMENTS = 256
_LONGEST_CLOSE_SECONDS = 2.0


class AdviceFeed:
    """The advice of one run. `scale`, `advised_scale` and `acknowledge` never wait and never raise.

    Make it from a Client (it waits in the background until the run is registered), or from the service's address and
    a run's id. `attempt` is the attempt that this trainer is; answers for another one are left out. Keep
    `state_dict()` in the trainer's checkpoint: a resumed trainer then starts at the scale it had, even while the
    service is away.
    """

    def __init__(
        self,
        source: Client | str | None = None,
        run: str | None = None,
        *,
        attempt: int | None = None,
        api_key: str | None = None,
        wait_seconds: float = 20.0,
    ) -> None:
        """`source` is a Client, or the service's address (None: FORESHOCK_URL). Raises ConfigurationError."""
        self._client: Client | None = None
        self._run = run
        if source is None or isinstance(source, str):
            if run is None:
                raise ConfigurationError("AdviceFeed needs a Client, or the service's address and a run's id")
            settings = ClientSettings.resolve(source, api_key)
            self._new_connection: Callable[[], ServiceConnection] = functools.partial(
                ServiceConnection, settings.url, settings.api_key
            )
        else:
            client = source
            self._client = client
            self._new_connection = client.new_connection
        self._attempt = attempt
        self._wait_seconds = wait_seconds
        self._connection = self._new_connection()
        self._log = LogOnce("foreshock.learning_rate")
        self._advice: Advice | None = None
        self._taking = threading.Lock()
        self._step: int | None = None
        self._asked_beyond_wanted_at: int | None = None
        self._etag: str | None = None
        self._stop = threading.Event()
        self._acknowledgements: deque[tuple[int, int, float]] = deque(maxlen=_KEPT_ACKNOWLEDGEMENTS)
        self._acknowledged = threading.Event()
        self._acknowledger: threading.Thread | None = None
        self._poller = threading.Thread(target=self._poll_until_stopped, name="foreshock-advice", daemon=True)
        self._poller.start()

    def scale(self, step: int) -> float:
        """The factor for the learning rate at training step `step`; 1.0 in shadow, or before anything is known."""
        advice = self._at(step)
        return 1.0 if advice is None else advice.scale(int(step))

    def advised_scale(self, step: int) -> float:
        """The factor as advised, in shadow too."""
        advice = self._at(step)
        return 1.0 if advice is None else advice.advised_scale(int(step))

    @property
    def advice(self) -> Advice | None:
        """The newest answer, None before there is one."""
        return self._advice

    @property
    def mode(self) -> str:
        """Either "shadow" (the trainer is told 1.0) or "apply"."""
        return "shadow" if self._advice is None else self._advice.mode

    @property
    def revision(self) -> int:
        """The revision of the newest answer; it never goes back. 0 before there is one."""
        return 0 if self._advice is None else self._advice.revision

    @property
    def alerts(self) -> tuple[AdviceAlert, ...]:
        """The run's open alerts."""
        return () if self._advice is None else self._advice.alerts

    @property
    def want_weights_at_step(self) -> int | None:
        """A step whose weights the service would like to have saved, if any."""
        return None if self._advice is None else self._advice.want_weights_at_step

    def acknowledge(self, step: int, applied_learning_rate: float) -> None:
        """Tell the service, in the background, which learning rate was used at `step`."""
        if self._client is not None:
            self._client.acknowledge(self.revision, step, applied_learning_rate)
            return
        self._acknowledgements.append((self.revision, int(step), float(applied_learning_rate)))
        if self._acknowledger is None:
            self._acknowledger = threading.Thread(
                target=self._acknowledge_until_stopped, name="foreshock-acknowledgements", daemon=True
            )
            self._acknowledger.start()
        self._acknowledged.set()

    def state_dict(self) -> dict[str, Any]:
        """What is known, as plain JSON values, for the trainer's checkpoint."""
        return {"advice": self._advice.to_json() if self._advice is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up `state_dict()`, unless something newer is known already."""
        if state.get("advice") is not None:
            self._take(Advice.from_json(state["advice"]))

    def close(self) -> None:
        """Stop asking; `scale` goes on answering from what is known."""
        self._stop.set()
        self._acknowledged.set()
        deadline = time.monotonic() + _LONGEST_CLOSE_SECONDS
        for thread in (self._poller, self._acknowledger):
            if thread is None or thread is threading.current_thread():
                continue
            while thread.is_alive() and time.monotonic() < deadline:
                # Time and again: a request that is only on its way out cannot be interrupted yet.
                self._connection.interrupt()
                thread.join(0.05)
        if not self._poller.is_alive():
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at(self, step: int) -> Advice | None:
        self._step = int(step) if self._step is None else max(self._step, int(step))
        return self._advice

    def _take(self, advice: Advice) -> bool:
        """Make `advice` the newest, unless it is late or a repetition; whether it was."""
        with self._taking:
            if self._advice is not None and advice.order < self._advice.order:
                return False
            self._advice = advice
        return True

    def _poll_until_stopped(self) -> None:
        failures = 0
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                polled = self._poll()
            except Exception as error:
                failures += 1
                if not self._stop.is_set():
                    self._log.warning("poll", f"no advice for now, the last schedule goes on: {error}")
                pause = min(_LONGEST_PAUSE_SECONDS, _SHORTEST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10))
                self._stop.wait(pause * random.uniform(0.75, 1.25))
                continue
            if polled and failures:
                failures = 0
                self._log.forget("poll")
            self._stop.wait(max(0.0, _LEAST_SECONDS_BETWEEN_POLLS - (time.monotonic() - started)))

    def _poll(self) -> bool:
        """Ask once; False where the run is not registered yet. Raises ServiceError, and ValueError for nonsense."""
        run = self._run if self._client is None else self._client.run_id
        if run is None:
            return False
        etag = self._etag if not self._has_passed_wanted_step() else None
        response = self._connection.request(
            "GET",
            f"/v1/runs/{run}/lr-advice",
            # A follower's steps are told: later decisions leave them alone.
            query={"step": self._step, "wait": self._wait_seconds if etag is not None else 0, "follow": "true"},
            headers={"If-None-Match": etag} if etag is not None else {},
            timeout_seconds=self._wait_seconds + 15.0,
        )
        if response.status_code == httpx.codes.NOT_MODIFIED:
            return True
        try:
            advice = Advice.from_json(self._connection.decoded(response))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServiceError(f"the service's advice cannot be understood: {error!r}") from error
        self._etag = response.headers.get("ETag")
        if self._is_ours(advice) and self._take(advice) and self._client is not None:
            self._client.note_wanted_weights(advice.want_weights_at_step)
        return True

    def _has_passed_wanted_step(self) -> bool:
        # The entity tag does not change with the step, so the next step that is wanted has to be asked for: once a
        # step, or a service that goes on wanting an old one would be asked without end.
        wanted, step = self.want_weights_at_step, self._step
        if wanted is None or step is None or step < wanted or step == self._asked_beyond_wanted_at:
            return False
        self._asked_beyond_wanted_at = step
        return True

    def _is_ours(self, advice: Advice) -> bool:
        own = self._attempt
        if own is None and self._client is not None:
            own = self._client.attempt
        if own is None or advice.attempt == own:
            return True
        if advice.attempt > own:
            self._log.warning("attempt", f"attempt {advice.attempt} has taken over the run: its advice is not for us")
        return False

    def _acknowledge_until_stopped(self) -> None:
        with contextlib.closing(self._new_connection()) as connection:
            while not self._stop.is_set():
                self._acknowledged.wait()
                self._acknowledged.clear()
                while self._acknowledgements and not self._stop.is_set():
                    revision, step, learning_rate = self._acknowledgements[0]
                    body = {"revision": revision, "step": step, "applied_lr": learning_rate}
                    try:
                        connection.request("POST", f"/v1/runs/{self._run}/lr-advice/ack", json_body=body)
                    except ServiceError as error:
                        self._log.warning("acknowledge", f"the learning rate could not be acknowledged: {error}")
                        if error.status is None or error.status >= 500:
                            self._stop.wait(_SHORTEST_PAUSE_SECONDS)
                            continue
                    with contextlib.suppress(IndexError):
                        self._acknowledgements.popleft()
