"""Late shards on a run of 100,000 steps: `make bench-late-shards`.

The steps' measures are written straight into a database, then a step changes as a late shard changes it, and the time
until states, alerts and advice are derived again is taken, with the garbage collector set as the service sets it. Bar:
less than 2 s of CPU, wherever the late step is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock_service.app import subscribe_handlers
from foreshock_service.platform.database.schema import upgrade
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Run, Step, measurements
from foreshock_service.platform.database.tables.measurements import MEASUREMENT_KEY
from foreshock_service.platform.events import EventBus
from foreshock_service.platform.garbage_collection import spare_collections
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.runs.attempts.schemas import AttemptCreate
from foreshock_service.runs.attempts.service import get_or_create_attempt
from foreshock_service.runs.events import StepClosed
from foreshock_service.runs.runs.schemas import RunCreate
from foreshock_service.runs.runs.service import get_or_create_run

STEPS = 100_000
FEWEST_STEPS = 2_000
LARGEST_SECONDS = 2.0
_ROWS_AT_ONCE = 5_000
_TIMES = ("first_shard_at_us", "last_shard_at_us", "closed_at_us")
_COUNTS = ("expected_shards", "received_shards", "rollouts", "tokens")

STEP_MEASURES = ("response_length_mean", "response_length_max", "truncated_fraction", "reward_mean", "entropy_mean")
PAIR_MEASURES = (
    "k3_kl",
    "k3_kl_per_entropy",
    "chi2_token",
    "reverse_chi2_token",
    "rollout_probs_diff_mean",
    "log_ppl_abs_diff",
    "token_mult_prob_error",
    "training_ppl",
    "tail_2",
    "tail_asymmetry_ln2",
    "ess_token",
    "max_abs_d",
    "mean_ratio",
    "advantage_d_cov",
    "advantage_skew",
    "surprisal_z",
)


class LongRun:
    """A healthy run in a database of its own: steady lengths with noise, a reward that is learned, a small k3."""

    def __init__(self, folder: Path, steps: int) -> None:
        url = f"sqlite:///{folder / 'foreshock.db'}"
        upgrade(url)
        self.database = Database(url)
        self.events = subscribe_handlers(EventBus())
        self.steps = steps
        self._random = np.random.default_rng(1)

        def begin(session: Session) -> str:
            run, _ = get_or_create_run(session, self.events, UNRESTRICTED, RunCreate(key="long"))
            get_or_create_attempt(session, self.events, UNRESTRICTED, run.id, AttemptCreate(key="first"))
            return run.id

        self.run = self.database.write(begin)

    def fill(self, missing: set[int]) -> None:
        """Write all steps but the missing ones, without any replay."""
        numbers = [step for step in range(1, self.steps + 1) if step not in missing]
        for first in range(0, len(numbers), _ROWS_AT_ONCE):
            part = numbers[first : first + _ROWS_AT_ONCE]
            self.database.write(partial(self._insert, steps=part))
        self.database.write(lambda session: self._close(session, numbers[-1]))

    def change(self, step: int, length: float) -> None:
        """Change the length of a step, or close it late, as a late shard does; the replay is part of the call."""

        def work(session: Session) -> None:
            key = {"run_id": self.run, "attempt": 1, "step": step}
            if session.get(Step, (self.run, 1, step)) is None:
                self._insert(session, [step])
            of_step = measurements.c
            session.execute(
                update(measurements)
                .where(*(of_step[name] == value for name, value in key.items()), of_step.comparison == "rollout")
                .values(response_length_mean=length)
            )
            self.events.publish(session, StepClosed(self.run, 1, step))

        self.database.write(work)

    def change_all(self, step: int) -> None:
        """Change every measure of a step, as a late shard of its rollouts does; the replay is part of the call."""

        def work(session: Session) -> None:
            for row in (self._row(step, "rollout", self._of_step(step)), self._pair_row(step)):
                of_step = [measurements.c[name] == row[name] for name in MEASUREMENT_KEY]
                session.execute(update(measurements).where(*of_step).values(row))
            self.events.publish(session, StepClosed(self.run, 1, step))

        self.database.write(work)

    def _close(self, session: Session, step: int) -> None:
        session.execute(update(Run).where(Run.id == self.run).values(last_step=step))
        self.events.publish(session, StepClosed(self.run, 1, step))

    def _insert(self, session: Session, steps: list[int]) -> None:
        session.execute(
            insert(Step),
            [
                {"run_id": self.run, "attempt": 1, "step": step, **dict.fromkeys((*_COUNTS, *_TIMES), 1)}
                for step in steps
            ],
        )
        session.execute(insert(measurements), [self._row(step, "rollout", self._of_step(step)) for step in steps])
        session.execute(insert(measurements), [self._pair_row(step) for step in steps])

    def _pair_row(self, step: int) -> dict[str, object]:
        return self._row(step, TRAINER_ROLLOUT, self._of_pair())

    def _row(self, step: int, comparison: str, values: dict[str, float]) -> dict[str, object]:
        of_step = {"run_id": self.run, "attempt": 1, "step": step, "comparison": comparison}
        return {**of_step, "from_sample": False, "computed_at_us": 1, **values}

    def _of_step(self, step: int) -> dict[str, float]:
        noise = self._random.normal(size=3)
        mean = 1000.0 * float(np.exp(0.1 * noise[0]))
        reward = 0.8 - 0.5 * float(np.exp(-step / 1e4)) + 0.02 * float(noise[1])
        return dict(zip(STEP_MEASURES, (mean, 3.0 * mean, 0.0, reward, 0.5 + 0.02 * float(noise[2])), strict=True))

    def _of_pair(self) -> dict[str, float]:
        noise = self._random.normal(size=len(PAIR_MEASURES))
        k3 = 1e-4 * np.exp(0.3 * noise)
        values = {
            "k3_kl": k3[0],
            "k3_kl_per_entropy": 2.0 * k3[0],
            "chi2_token": 2.0 * k3[1],
            "reverse_chi2_token": 2.0 * k3[2],
            "rollout_probs_diff_mean": 10.0 * k3[3],
            "log_ppl_abs_diff": 10.0 * k3[4],
            "token_mult_prob_error": 1.01 + 1e-3 * noise[5],
            "training_ppl": 1.6 + 0.05 * noise[6],
            "tail_2": 10.0 * k3[7],
            "tail_asymmetry_ln2": 1e-4 * noise[8],
            "ess_token": 0.99 + 1e-3 * noise[9],
            "max_abs_d": 0.5 + 0.05 * noise[10],
            "mean_ratio": 1.0 + 1e-3 * noise[11],
            "advantage_d_cov": 1e-4 * noise[12],
            "advantage_skew": 1e-4 * noise[13],
            "surprisal_z": noise[14],
        }
        return {name: float(values[name]) for name in PAIR_MEASURES}


def seconds_of(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, of all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def parse_steps() -> int:
    """Return the steps of the run, of which --steps is fewer for a trial."""
    parser = argparse.ArgumentParser(description="Time late shards on a long run.")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the run; the bar holds for the default")
    steps: int = parser.parse_args().steps
    if steps < FEWEST_STEPS:
        parser.error(f"--steps must be at least {FEWEST_STEPS}, got {steps}")
    return steps


def main() -> int:
    """Print the seconds by the place of the late step; return 1 if the bar is missed."""
    steps = parse_steps()
    with tempfile.TemporaryDirectory() as folder:
        run = LongRun(Path(folder), steps)
        # Steps that are closed late.
        middle, early = steps // 2, steps // 100
        missing = {2 * early, middle + 1}
        spare_collections()
        whole = seconds_of(lambda: run.fill(missing))
        print(f"{steps} steps written and replayed once: {whole:.1f} s of CPU\n")
        print(f"{'late step':44}{'seconds of CPU':>16}{'bar':>6}")
        cases = {
            f"length changed, in the middle ({middle:,})": partial(run.change, middle, 1100.0),
            f"length changed, early ({early:,})": partial(run.change, early, 950.0),
            f"closed late, in the middle ({middle + 1:,})": partial(run.change, middle + 1, 1020.0),
            f"closed late, early ({2 * early:,})": partial(run.change, 2 * early, 990.0),
            f"a doubled length, late ({steps * 7 // 10:,})": partial(run.change, steps * 7 // 10, 2300.0),
            "length changed, in the baseline (3)": partial(run.change, 3, 900.0),
            "every measure changed, in the baseline (5)": partial(run.change_all, 5),
            f"every measure changed, in the middle ({middle:,})": partial(run.change_all, middle),
        }
        taken = {}
        for name, change in cases.items():
            taken[name] = seconds_of(change)
            print(f"{name:52}{taken[name]:8.2f}{LARGEST_SECONDS:6.1f}", flush=True)
        run.database.close()
    worst = max(taken.values())
    reached = worst < LARGEST_SECONDS
    print(f"reached={reached} steps={steps} slowest_seconds={worst:.2f}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
