"""The advice feed: polls the advice in a background thread; `scale(step)`, `correction(step)` and `rollback(step)` use
the newest answer and never wait.

One process polls (the driver, or rank 0) and passes the scale on in what it already broadcasts: the feed never starts a
collective. While the service is unavailable, the last answer stays: `scale` evaluates its schedule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import httpx

from foreshock.client.reporting import LogOnce
from foreshock.errors import ServiceError, ServiceUnavailable, WrongService
from foreshock.learning_rate.advice import Advice, AdviceAlert
from foreshock.learning_rate.length_decay import warmed
from foreshock.learning_rate.levers import Correction, Rollback, Value
from foreshock.learning_rate.modes import BesideTheRate
from foreshock.retry import Backoff

if TYPE_CHECKING:
    from foreshock.client.client import Client

__all__ = ["AdviceFeed"]

_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 30.0
_MIN_SECONDS_BETWEEN_POLLS = 0.2
_MAX_CLOSE_SECONDS = 2.0
_NONE = Advice(run="", attempt=0, revision=0)
"""Before the first answer: shadow mode."""
# A trainer asks one or two steps ahead of what it has logged.
_STEPS_AHEAD = 2


class AdviceFeed:
    """The advice of a client's run. Its methods never wait and never raise, apart from a callback of `on_rollback`.

    `scale` accepts any step, for example for a plot. It reports the step to the service as the trainer's present one
    only if it is at most two beyond the newest one that was logged, acknowledged, or seen by the service.

    Polling starts when the run is registered. Each lever has its mode. The default is shadow mode: advice is shown,
    `scale()` returns 1.0, `correction()` and `rollback()` None. Answers for other attempts are ignored. Save
    `state_dict()` in the trainer's checkpoint: a resumed trainer then starts at the same scale, even if the service is
    unavailable. A state of another run is dropped.
    """

    def __init__(self, client: Client, *, wait_seconds: float = 20.0) -> None:
        """Start polling; `wait_seconds` is the timeout of a long poll."""
        self._client = client
        self._wait_seconds = wait_seconds
        self._connection = client.new_connection()
        self._log = LogOnce("foreshock.learning_rate")
        self._advice = _NONE
        self._advice_lock = threading.Lock()
        # The id of the run that is polled.
        self._run: str | None = None
        # The trainer's newest step.
        self._step: int | None = None
        self._attempt_key = client.attempt_key
        self._followed_step: int | None = None
        self._polled_past_request_at: int | None = None
        self._etag: str | None = None
        self._stop = threading.Event()
        self._reported: dict[BesideTheRate, tuple[Value | None, str | None]] = {}
        self._roll_back: Callable[[Rollback], object] | None = None
        # Attempt and first step of the rollback that the callback got last.
        self._called_back: tuple[int, int] | None = None
        self._poller = threading.Thread(target=self._poll_until_stopped, name="foreshock-advice", daemon=True)
        self._poller.start()

    def scale(self, step: int) -> float:
        """Return the learning-rate factor of training step `step`; 1.0 in shadow mode and before the first answer.

        If the client's trainer asks for the apply mode, the first steps have a warm-up, also before an answer.
        """
        advice = self._advice_at(step)
        scale = advice.scale(int(step))
        if not self._client.asks_to_apply or (advice is not _NONE and advice.mode != "apply"):
            return scale
        return warmed(scale, int(step), advice.floor)

    def advised_scale(self, step: int) -> float:
        """Return the advised factor of `step`, also in shadow mode; 1.0 before the first answer."""
        return self._advice_at(step).advised_scale(int(step))

    def correction(self, step: int) -> Correction | None:
        """Return the correction of the loss at `step`; None: as the trainer is configured, also in shadow mode.

        `foreshock.corrections.weights(d, mask, found.kind, found.threshold)` are its weights.
        """
        return self._advice_at(step).corrected(int(step))

    def rollback(self, step: int) -> Rollback | None:
        """Return the checkpoint to go back to before `step`; None: go on, also in shadow mode.

        It calls the callback of `on_rollback`, once for each proposal, and reports what came of it.
        """
        advice = self._advice_at(step)
        found = advice.rolled_back(int(step))
        if found is None or self._roll_back is None:
            return found
        proposal = advice.attempt, advice.rollback.since(int(step))
        if proposal != self._called_back:
            self._called_back = proposal
            try:
                refused = None if self._roll_back(found) is not False else "the trainer's callback refuses it"
            except Exception as error:
                self._log.warning("rollback", f"the trainer did not go back to step {found.step}: {error!r}")
                refused = f"{type(error).__name__}: {error}"
            self.report("rollback", step, None if refused else found, refused)
        return found

    def on_rollback(self, callback: Callable[[Rollback], object]) -> None:
        """Register what goes back to a checkpoint: `rollback(step)` calls it, in its thread, once for each proposal.

        If the callback raises or returns False, the rollback is reported as refused.
        """
        self._roll_back = callback

    def report(self, lever: BesideTheRate, step: int, done: Value | None = None, refused: str | None = None) -> None:
        """Report the value of a lever that the trainer uses at `step`, or why it refuses the advised one.

        What was reported before is not sent again.
        """
        if self._reported.get(lever) != (done, refused):
            self._reported[lever] = done, refused
            self._client.report_lever(self.revision, step, lever, done, refused)

    @property
    def advice(self) -> Advice | None:
        """The newest answer, None before the first one."""
        return None if self._advice is _NONE else self._advice

    @property
    def mode(self) -> str:
        """The run's mode: "shadow" (the default: `scale` returns 1.0) or "apply"."""
        return self._advice.mode

    @property
    def revision(self) -> int:
        """The revision of the newest answer, which never decreases within a run; 0 before the first one."""
        return self._advice.revision

    @property
    def alerts(self) -> tuple[AdviceAlert, ...]:
        """The run's open alerts."""
        return self._advice.alerts

    @property
    def want_weights_at_step(self) -> int | None:
        """The step whose weights the service wants saved; None without one."""
        return self._advice.want_weights_at_step

    def acknowledge(self, step: int, applied_learning_rate: float, applied_scale: float | None = None) -> None:
        """Report the learning rate used at `step`, and the scale in it if known, to the service, in the background."""
        self._client.acknowledge(self.revision, step, applied_learning_rate, applied_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the newest answer as plain JSON values, for the trainer's checkpoint; it names its run."""
        return {"advice": self.advice and self.advice.to_json(), "run_key": self._run_key}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state_dict()`, unless it is of another run, or a newer answer is already known."""
        if state.get("advice") is None:
            return
        saved = Advice.from_json(state["advice"])
        if list(state.get("run_key") or self._run_key) != self._run_key:
            self._log_dropped(saved)
        else:
            self._take(saved)

    def close(self) -> None:
        """Stop polling. `scale` continues with the newest answer."""
        self._stop.set()
        self._connection.interrupt()
        self._poller.join(_MAX_CLOSE_SECONDS)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _advice_at(self, step: int) -> Advice:
        step, advice = int(step), self._advice
        if self._client.attempt_key != self._attempt_key:
            # A restart in this process, which may begin at an earlier step.
            self._attempt_key = self._client.attempt_key
            self._step = self._followed_step = None
            self._reported = {}
        reached = max(self._client.newest_step, advice.observed_step)
        # Decisions never change steps up to a followed one, so following a step far ahead would stop all advice.
        if step <= reached + _STEPS_AHEAD:
            self._step = step if self._step is None else max(self._step, step)
        return advice

    @property
    def _run_key(self) -> list[str]:
        """Project and key of the run, which are known before its id is."""
        return [self._client.project, self._client.run_key]

    def _take(self, advice: Advice) -> bool:
        """Make `advice` the newest; False if it is older than the newest one, or of another run."""
        with self._advice_lock:
            newest = self._advice
            if self._run not in (None, advice.run):
                self._log_dropped(advice)
                return False
            if newest.run == advice.run and advice.order < newest.order:
                return False
            self._advice = advice
        return True

    def _know_run(self, run: str) -> None:
        """Set the run's id, and drop the advice of another run."""
        with self._advice_lock:
            if run == self._run:
                return
            self._run = run
            self._etag = self._followed_step = self._polled_past_request_at = None
            if self._advice is not _NONE and self._advice.run != run:
                self._log_dropped(self._advice)
                self._advice = _NONE

    def _log_dropped(self, advice: Advice) -> None:
        self._log.warning(
            f"run {advice.run}",
            f"advice of the run {advice.run} is dropped (attempt {advice.attempt}, revision {advice.revision}): it was "
            "saved in that run, or the service's database was replaced",
        )

    def _poll_until_stopped(self) -> None:
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                run = self._client.run_id
                if run is not None:
                    self._know_run(run)
                    self._poll(run)
                    backoff.reset()
                    self._log.forget("poll")
            except Exception as error:
                if not self._stop.is_set():
                    self._log.warning("poll", f"polling the advice failed, the last schedule stays in use: {error}")
                self._stop.wait(backoff.next_delay(getattr(error, "retry_after_seconds", None)))
            self._stop.wait(max(0.0, _MIN_SECONDS_BETWEEN_POLLS - (time.monotonic() - started)))

    def _poll(self, run: str) -> None:
        """Poll once. Raises ServiceError."""
        step = self._step
        if step is not None and step != self._followed_step:
            self._follow(run, step)
        etag = self._etag if not self._passed_requested_step() else None
        response = self._connection.request(
            "GET",
            f"/v1/runs/{run}/advice",
            query={"step": step, "wait": self._wait_seconds if etag is not None else 0},
            headers={"If-None-Match": etag} if etag is not None else {},
            timeout_seconds=self._wait_seconds + 15.0,
        )
        if response.status_code == httpx.codes.NOT_MODIFIED:
            return
        try:
            advice = Advice.from_json(self._connection.decoded(response))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WrongService(f"{self._connection.url} sent invalid advice: {error!r}; check its release") from error
        self._know_run(advice.run)
        self._etag = response.headers.get("ETag")
        if self._is_ours(advice) and self._take(advice):
            self._client.set_checkpoint_request(advice.want_weights_at_step)

    def _follow(self, run: str, step: int) -> None:
        """Report the trainer's step, so that later decisions do not change steps up to it."""
        attempt = self._client.attempt
        if attempt is None:
            # Not registered yet: the step would count for the previous attempt.
            return
        try:
            path = f"/v1/runs/{run}/lr-advice/follow"
            answer = self._connection.request("POST", path, json_body={"step": step, "attempt": attempt})
            if answer.content and (self._connection.decoded(answer).get("newest_attempt") or 0) < attempt:
                # This attempt has not begun at the service yet: the report did not count.
                return
        except ServiceUnavailable:
            raise
        except ServiceError as error:
            # Such as a read-only key.
            self._log.warning("follow", f"the step of this trainer is not reported: {error}")
        self._followed_step = step

    def _passed_requested_step(self) -> bool:
        # The ETag does not depend on the step, so the next requested step needs a poll without it: one per step, or a
        # service that keeps requesting an old step would be polled in a busy loop.
        requested, step = self.want_weights_at_step, self._step
        if requested is None or step is None or step < requested or step == self._polled_past_request_at:
            return False
        self._polled_past_request_at = step
        return True

    def _is_ours(self, advice: Advice) -> bool:
        own = self._client.attempt
        if own is not None and advice.attempt > own:
            self._log.warning(
                "attempt", f"attempt {advice.attempt} has taken over the run; its advice is ignored by attempt {own}"
            )
        return own in (None, advice.attempt)
