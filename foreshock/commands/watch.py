"""`foreshock watch`: print a line per closed step, the diagnosis when it changes, and each new alert."""

import argparse
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from foreshock.api.runs import RunRecord
from foreshock.api.watch import STANDING
from foreshock.client.reader import Reader
from foreshock.commands.command import Command, add_run_argument, add_service_options, connect
from foreshock.commands.option_types import POSITIVE, STEP
from foreshock.commands.queries import Rows, find_run, measured, measured_or_reported, sorted_alerts
from foreshock.commands.text import STYLES, WIDTH, Paint, number, sparkline, wrap
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.lag_zero import LAG_ZERO_COLUMNS, at_lag_zero
from foreshock.diagnosis.lags import LAG_KEY
from foreshock.errors import ServiceUnavailable
from foreshock.healthy_ranges import verdict_of
from foreshock.model_kind import UNDECLARED_NOTE, ModelKind

_MISMATCH = ("k3_kl", "mean_abs_d")
_NUMBERS = re.compile(r"[×÷] |[−\d][\d.,]*(?:e−?-?\d+)?")
_SHOWN_STEPS = 60
"""Newest steps in the sparklines."""
_ROLLOUTS = ("response_length_mean", "truncated_fraction", "reward_mean", "entropy_mean", "lag_mean")


@dataclass(slots=True)
class _Watch:
    """The state of watching: the next step, the attempts that have begun, and the alerts already printed.

    `seen_step` is the newest step at the last look; `has_rewards` whether the newest printed step has a reward.
    """

    reader: Reader
    run_id: str
    paint: Paint
    model_kind: ModelKind | None
    first_step: int
    next_step: int
    seen_step: int = -1
    has_rewards: bool = False
    attempts: int = 0
    said: str = ""
    alerts: set[str] = field(default_factory=set)

    def print_new(self, run: RunRecord, *, is_last: bool) -> None:
        """Print new steps and alerts of the run as it is now. Raises ServiceError.

        The newest step of a run that goes on is left for later if its scalars may still arrive.
        """
        self._go_back_to_resumes()
        rows = measured_or_reported(self.reader, run, _ROLLOUTS, self.next_step)
        mismatch = measured(self.reader, self.run_id, TRAINER_ROLLOUT, LAG_ZERO_COLUMNS, self.next_step)
        steps = [*rows]
        if steps and not is_last and self._awaits_scalars(run, rows):
            steps.pop()
        self.seen_step = max(rows, default=self.seen_step)
        for step in steps:
            row, of_tokens = rows[step], mismatch.get(step, {})
            length, truncated, reward, entropy, lag = map(row.get, _ROLLOUTS)
            values = {f"{TRAINER_ROLLOUT}:{name}": value for name, value in of_tokens.items()}
            k3 = self._k3(of_tokens.get("k3_kl", math.nan), values if lag is None else values | {LAG_KEY: lag})
            print(
                f"step {step:<5} k3 {k3} |d| {number(of_tokens.get('mean_abs_d')):<8} "
                f"len {number(length):<6} cut {number(truncated, 2):<6} reward {number(reward):<6} "
                f"entropy {number(entropy)}".rstrip(),
                flush=True,
            )
            self.has_rewards = reward is not None
        if steps:
            self.next_step = steps[-1] + 1
            print(self._sparklines(run), flush=True)
        self._print_diagnosis()
        for alert in sorted_alerts(self.reader, self.run_id):
            if alert.id not in self.alerts and alert.state in STANDING:
                self.alerts.add(alert.id)
                head = f"{alert.severity.upper()} at step {alert.step}: {alert.rule}"
                why = wrap(alert.why, "     ") if alert.why else []
                print("\n".join([self.paint(head, STYLES.get(alert.severity)), *why]), flush=True)

    def _awaits_scalars(self, run: RunRecord, rows: Rows) -> bool:
        """Return whether scalars of the newest step may still arrive: always in a run without rollouts.

        A trainer reports its reward after the rollouts, which close the step. A reward is awaited until the next step
        closes if the step before has one, else until the next look.
        """
        newest = max(rows)
        may_come = self.has_rewards or newest != self.seen_step
        return run.last_step is None or (may_come and "reward_mean" not in rows[newest])

    def _go_back_to_resumes(self) -> None:
        """Go back to the first step that a new attempt repeats, as it has other rollouts. Raises ServiceError."""
        attempts = list(self.reader.attempts(self.run_id))
        for attempt in attempts[self.attempts :] if self.attempts else ():
            if attempt.resume_step < self.next_step:
                print(f"attempt {attempt.attempt} begins at step {attempt.resume_step}", flush=True)
                self.next_step = max(attempt.resume_step, self.first_step)
        self.attempts = len(attempts)

    def _k3(self, k3: float, values: Mapping[str, float]) -> str:
        """Return k3 of all tokens and, if it differs, that of lag 0; the value that the range judges is coloured."""
        judged = at_lag_zero("k3_kl", values)
        if judged is None:
            return f"{number(k3):<8}"
        fresh = self.paint(f"{number(judged):<8}", STYLES.get(verdict_of("k3_kl", judged, self.model_kind)))
        return fresh if judged == k3 else f"{number(k3):<8} lag 0 {fresh}"

    def _print_diagnosis(self) -> None:
        """Print the headline and what to do if it says something new: other numbers are on each step's line."""
        found = self.reader.diagnosis(self.run_id)
        said = _NUMBERS.sub("", found.headline)
        if said != self.said:
            self.said = said
            print(self.paint(found.headline, STYLES.get(found.verdict)), flush=True)
            for step in found.next_steps[:1]:
                print("\n".join(wrap(step, "       ", "     → ")), flush=True)

    def _sparklines(self, run: RunRecord) -> str:
        """Return the curves of the newest steps, read anew: a scalar may come after its step. Raises ServiceError."""
        start = max(0, self.next_step - _SHOWN_STEPS)
        found = measured_or_reported(self.reader, run, _ROLLOUTS, start)
        mismatch = measured(self.reader, self.run_id, TRAINER_ROLLOUT, ("k3_kl",), start)
        steps = [step for step in found if step < self.next_step]
        k3 = [mismatch.get(step, {}).get("k3_kl", math.nan) for step in steps]
        lengths, rewards = (
            [found[step].get(name, math.nan) for step in steps] for name in ("response_length_mean", "reward_mean")
        )
        width = (WIDTH - 26) // 3
        return (
            f"  k3 {sparkline(k3, width, logarithmic=True)}  length {sparkline(lengths, width)}  "
            f"reward {sparkline(rewards, width)}".rstrip()
        )


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, required=False)
    parser.add_argument("--from-step", type=STEP, metavar="N", help="start at step N (default: the last 10 steps)")
    parser.add_argument("--interval", type=POSITIVE, default=2.0, metavar="SECONDS", help="between polls (default: 2)")
    parser.add_argument("--once", action="store_true", help="print the present state and exit")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    with connect(arguments) as reader:
        run = find_run(reader, arguments.run)
        from_step, last = arguments.from_step, run.last_step
        if last is None:
            last = max(measured_or_reported(reader, run, _ROLLOUTS), default=None)
        if from_step is None:
            from_step = max(0, (last or 0) - 9)
        watch = _Watch(reader, run.id, Paint(), run.model_kind, arguments.from_step or 0, from_step)
        print(f"{run.title} ({run.id}), {run.state}")
        if from_step > (last or 0):
            newest = "no step yet" if last is None else f"newest step {last}"
            print(f"no step from {from_step} on: the run has {newest}")
        if run.model_kind is None:
            print("\n".join(wrap(UNDECLARED_NOTE, "  ", "  ")))
        unavailable = False
        while True:
            try:
                run = find_run(reader, run.id)
                has_ended = arguments.once or run.state != "running"
                watch.print_new(run, is_last=has_ended)
                unavailable = False
            except ServiceUnavailable as error:
                if arguments.once:
                    raise
                if not unavailable:
                    print(f"{error}; retrying", file=sys.stderr)
                unavailable = True
            else:
                if has_ended:
                    print(f"the run is {run.state}")
                    return 0
            time.sleep(arguments.interval)


command = Command("follow a run: a line per new step, and its alerts", configure, run)
