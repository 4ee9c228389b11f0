"""The run of a trainer: what is the same for every framework.

The environment may ask for modes of the levers and for a correction. A resumed run waits for its first scale, which may
be below 1: an update at the full rate would undo the advice.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from foreshock.client.client import Client
from foreshock.client.reporting import LogOnce
from foreshock.diagnosis.quantities import LAST_STEP_NAME
from foreshock.integrations.corrections import SetCorrection
from foreshock.integrations.hooks import is_number
from foreshock.learning_rate.apply import applied_learning_rates, apply_scale
from foreshock.learning_rate.feed import AdviceFeed
from foreshock.learning_rate.levers import Correction

__all__ = ["Decisions", "TrainerRun", "await_first_advice", "modes_of_environment", "of_the_leader"]

FIRST_ADVICE_SECONDS = 10.0

Decisions = tuple[float, Correction | None]
"""The scale and the correction of a step."""


class TrainerRun:
    """The client and the feed of a trainer's process, with what every integration does with them.

    `set_correction` changes the trainer's settings. A process that logs nothing has no client, one that does not lead
    has no feed. `planned` returns the trainer's last step, None if it is unknown.
    """

    def __init__(self, framework: str, log: LogOnce, set_correction: SetCorrection) -> None:
        self.framework = framework
        self.log = log
        self._correction: Correction | None = None
        self.client: Client | None = None
        self.feed: AdviceFeed | None = None
        self._change_settings = set_correction
        self.planned: Callable[[], Any] = lambda: None
        self._decided: Decisions = (1.0, None)
        self._logged_rollouts = False
        self._steps_of_metrics = set[int]()

    def connect(self, run_key: str | None, client: Client | None = None) -> Client:
        """Make the client, which repeats on the run's page what the log says; or take a client that is given."""
        self.client = client or Client(run_key=run_key)
        self.client.tell_remarks_of(self.log)
        return self.client

    def start(
        self,
        resume_step: int,
        *,
        leads: bool = True,
        first_step: int = 1,
        saved: dict[str, Any] | None = None,
        **description: Any,
    ) -> None:
        """Begin an attempt. The process that leads gets a feed; if the run is resumed, it waits for the advice.

        `saved` is the feed's state in the checkpoint from which the run is resumed.
        """
        assert self.client is not None
        self.client.start_run(**description, resume_step=resume_step)
        if leads:
            self.feed = AdviceFeed(self.client)
            if saved is not None:
                self.feed.load_state_dict(saved)
            if resume_step > first_step:
                await_first_advice(self.feed, self.log)

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numbers among the trainer's metrics, and its last step."""
        numbers = {name: float(value) for name, value in metrics.items() if is_number(value)}
        last = self.planned()
        if is_number(last):
            numbers[LAST_STEP_NAME] = float(last)
        if len(self._steps_of_metrics) < 2:
            self._steps_of_metrics.add(step)
        if len(self._steps_of_metrics) == 2 and not self._logged_rollouts:
            self.log.warning(
                "no rollouts",
                f"{self.framework}: the metrics of two steps were logged and no rollouts: nothing that is observed "
                "was called with a batch, or it was refused. Log rollouts with Client.log_rollouts.",
            )
        assert self.client is not None
        self.client.log_scalars(step, numbers)

    def log_columns(self, step: int, columns: Mapping[str, Any], **keywords: Any) -> None:
        """Log columns of rollouts, with the arguments of `Client.log_rollouts`."""
        assert self.client is not None
        self._logged_rollouts = True
        self.client.log_rollouts(step, columns, **keywords)

    def warn_of_missing_log_probs(self, columns: Mapping[str, Any], engine: str, trainer: str) -> None:
        """Warn if the log-probs of a side are missing; `engine` and `trainer` say why, or what turns them on."""
        side = next((each for each in ("rollout", "trainer") if f"{each}_log_probs" not in columns), None)
        if side is not None:
            self.log.warning(
                f"no {side} log-probs",
                f"{self.framework}'s {engine if side == 'rollout' else trainer}, so there is no training-inference "
                "mismatch to measure. Lengths, rewards and metrics are logged.",
            )

    def decisions(self, step: int) -> Decisions:
        """Return the scale and the correction of a step; the last ones, with an error in the log, if that fails."""
        if self.feed is None:
            return 1.0, None
        try:
            self._decided = self.feed.scale(step), self.feed.correction(step)
        except Exception as error:
            # Other processes may be waiting for a number.
            self.log.exception("scale", "the advice could not be read, the last one stays in use", error)
        return self._decided

    def correct(self, correction: Correction | None, step: int) -> None:
        """Apply the correction of a step to the trainer, and report what was done."""
        if correction is None and self._correction is None:
            return
        refused = self._change_settings(correction)
        if refused is None:
            self._correction = correction
        else:
            self.log.warning("correction", f"{self.framework}: the advised correction is not applied: {refused}")
        if self.feed is not None:
            self.feed.report("correction", step, None if refused else correction, refused)

    def apply(self, optimizer: Any, scale: float, step: int) -> bool:
        """Scale the learning rate of an optimizer, and report it; return False if it cannot be scaled."""
        applied = apply_scale(optimizer, scale)
        if applied and self.feed is not None:
            self.feed.acknowledge(step, applied_learning_rates(optimizer)[0], scale)
        return applied


def modes_of_environment() -> dict[str, Any]:
    """Return the modes, and the correction to advise, that the environment asks for, as arguments of `start_run`."""
    names = {"advice_mode": "FORESHOCK_ADVICE_MODE", "correction_mode": "FORESHOCK_CORRECTION_MODE"}
    modes = {field: "apply" if os.environ.get(name) == "apply" else None for field, name in names.items()}
    return modes | {"correction": os.environ.get("FORESHOCK_CORRECTION") or None}


def await_first_advice(feed: AdviceFeed, log: LogOnce, seconds: float = FIRST_ADVICE_SECONDS) -> None:
    """Wait until the feed has an answer, for up to `seconds`.

    Without an answer training continues at the scale 1.0 until one arrives, and a warning says so.
    """
    deadline = time.monotonic() + seconds
    while feed.advice is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if feed.advice is None:
        log.warning(
            "first advice",
            f"the service did not answer within {seconds:g} s of the resume: the learning rate is not scaled until it "
            "does. Check FORESHOCK_URL and the service.",
        )


def of_the_leader(own: Decisions | None, group: Callable[[], Any]) -> Decisions:
    """Return the decisions of the leading training process, in all of them; the others have None.

    `group` returns the group of all of them on the CPU.
    """
    import torch

    known = [own]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        known = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(known, own, group=group())
    return next((each for each in known if each is not None), (1.0, None))
