"""Kill the service while it is uploaded to, start it again, and verify each run when it is complete."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from benchmarks.faults.kill_points import ADVANCE, SERVICE_POINTS
from benchmarks.faults.senders import RunSender
from benchmarks.faults.served import Served
from benchmarks.faults.verify import (
    ORPHAN_GRACE_SECONDS,
    Totals,
    check_catalogue,
    check_files,
    verify_run,
)
from benchmarks.faults.workload import RunPlan, plan_run

RANDOM_SHARE, STARTING_SHARE, DECODER_SHARE = 0.35, 0.06, 0.08
_POINT_SECONDS = 5.0
PATIENCE_TO_START_SECONDS = 3.0
# A point that is not passed within this many acknowledged requests counts as not reached in this part of the run.
_POINT_ANSWERS = 60
# Statements of `advance` before which it is killed; a call for one step executes about 60.
_MOST_STATEMENTS = 150
# Kills of one of several processes before all are killed.
_MOST_OF_ONE = 4
GRACE_SECONDS, LONG_GRACE_SECONDS = 2.0, 3600.0


def _grace_of(plan: RunPlan) -> str:
    """Return the grace time of a run's steps. It is long for a serial run: no shard is missing there, and its advice is
    compared."""
    return str(LONG_GRACE_SECONDS if plan.serial else GRACE_SECONDS)


class Campaign:
    """Kills of the service on one database, `most` in all, drawn from a seed; at the point `only`, if that is given."""

    def __init__(
        self, name: str, database_url: str, totals: Totals, *, most: int, seed: int, kills_a_run: int = 30,
        phases: int = 5, processes: int = 1, only: str = "",
    ) -> None:  # fmt: skip
        self.name, self.totals = name, totals
        self._only = only
        self._processes = processes
        self._url, self._most, self._seed = database_url, most, seed
        self._kills_a_run, self._phases = kills_a_run, phases
        self._pending: tuple[RunPlan, RunSender] | None = None
        self._used = Counter({point: totals.kills[point] for point in SERVICE_POINTS})

    def run(self) -> None:
        """Kill until `most` kills are done and the last run is verified."""
        with tempfile.TemporaryDirectory(prefix="foreshock-faults-") as name:
            folder = Path(name)
            served = Served(
                folder / "killed", self._url,
                FORESHOCK_PROCESSES=str(self._processes),
                FORESHOCK_ORPHAN_GRACE_SECONDS=str(ORPHAN_GRACE_SECONDS),
            )  # fmt: skip
            clean = Served(folder / "clean")
            try:
                while self._goes_on:
                    self._one_run(served, clean)
                self._verify_pending(served, clean)
                served.kill()
                served.start()
                served.wait_until("/readyz")
                check_catalogue(self.totals.findings, served)
                with served.database() as database:
                    check_files(self.totals.findings, database, served.store)
            finally:
                served.kill()
                clean.kill()

    @property
    def _goes_on(self) -> bool:
        """Return whether kills are left to do."""
        return self.totals.done < self._most

    def _one_run(self, served: Served, clean: Served) -> None:
        number = self.totals.runs
        draw = random.Random(f"{self._seed}-{self.name}-{number}")
        plan = plan_run(self._seed * 100_003 + number, serial=number % 2 == 1, phases=self._phases)
        served.kill()
        served.settings["FORESHOCK_STEP_GRACE_SECONDS"] = _grace_of(plan)
        sender = RunSender(served.url, plan)
        begun, killed, running = time.monotonic(), 0, False
        with sender.running() as thread:
            while thread.is_alive():
                if killed < self._kills_a_run and self._goes_on:
                    self._kill_once(draw, served, sender, thread)
                    killed += 1
                    continue
                if not running:
                    served.start()
                    running = True
                thread.join(0.05)
                if not served.alive:
                    raise RuntimeError(f"the service ended by itself: {served.end_of_log()}")
        self._verify_pending(served, clean)
        self._pending = (plan, sender)
        self.totals.runs += 1
        counts = self.totals.findings.counts
        print(
            f"{time.strftime('%H:%M:%S')} {self.name:11s} run {number:3d} {'serial' if plan.serial else 'ranks ':6s} "
            f"kills {killed:3d} (all {self.totals.done:4d}/{self._most}) in {time.monotonic() - begun:5.1f} s, "
            f"acknowledged shards {counts['acknowledged_shards']:6,d}, alerts {counts['alerts']}, "
            f"problems {len(self.totals.findings.problems)}",
            flush=True,
        )

    def _verify_pending(self, served: Served, clean: Served) -> None:
        """Verify the run before the newest one: the sweeper may take half a minute to finish work left by a crash."""
        if self._pending is None:
            return
        plan, sender = self._pending
        self._pending = None
        for each in (served, clean):
            if (grace := _grace_of(plan)) != each.settings.get("FORESHOCK_STEP_GRACE_SECONDS"):
                # The plan's own grace time limits the wait for shards that it never sends. In a serial run, a busy
                # machine may send a step slowly; the step must not close early, or a decision would use part of it.
                each.kill()
                each.settings["FORESHOCK_STEP_GRACE_SECONDS"] = grace
            if not each.alive:
                each.start()
            if not each.wait_until("/readyz"):
                raise RuntimeError(f"the service ended by itself: {each.end_of_log()}")
        verify_run(self.totals.findings, served, lambda: served.store, sender, clean)

    def _kill_once(self, draw: random.Random, served: Served, sender: RunSender, senders: threading.Thread) -> None:
        """Start the stopped service, and kill it at a random moment or at a point."""
        share = draw.random()
        if self._only:
            reason = self._at_point(draw, served, sender, senders)
        elif self._processes > 1 and share >= STARTING_SHARE:
            served.start()
            served.wait_until()
            for _ in range(draw.randint(0, _MOST_OF_ONE)):
                self._at_random(draw, served, sender, senders)
                if served.kill_process(draw):
                    self.totals.kills["one of several processes"] += 1
            reason = self._at_random(draw, served, sender, senders)
        elif share < STARTING_SHARE:
            served.start()
            time.sleep(draw.uniform(0.0, 1.2))
            reason = "while starting"
        elif share < STARTING_SHARE + RANDOM_SHARE:
            served.start()
            served.wait_until()
            reason = self._at_random(draw, served, sender, senders)
        else:
            reason = self._at_point(draw, served, sender, senders)
        served.kill()
        self.totals.kills["all processes" if self._processes > 1 and reason == "random" else reason] += 1

    def _at_random(self, draw: random.Random, served: Served, sender: RunSender, senders: threading.Thread) -> str:
        """Wait for some acknowledged requests and some milliseconds; sometimes kill a decoder meanwhile."""
        first, wanted = sender.journal.answers, draw.randrange(14)
        decoder_at = first + draw.randrange(8) if draw.random() < DECODER_SHARE / RANDOM_SHARE else None

        def end_decoder() -> None:
            nonlocal decoder_at
            if decoder_at is not None and sender.journal.answers >= decoder_at and served.kill_decoder():
                self.totals.decoder_kills += 1
                decoder_at = None

        sender.wait_for_answers(wanted, senders, _POINT_SECONDS, end_decoder)
        time.sleep(draw.uniform(0.0, 0.05))
        return "random"

    def _at_point(self, draw: random.Random, served: Served, sender: RunSender, senders: threading.Thread) -> str:
        """Start the service so that it ends itself at a point; return the point, or that it was not reached."""
        points = [point for point in SERVICE_POINTS if point.startswith("scores.") == sender.replaying]
        if self._only:
            points = [self._only]
        least = min(self._used[point] for point in points)
        point = draw.choice([each for each in points if self._used[each] <= least + 2])
        passes = 1 if sender.replaying else draw.randint(1, 4)
        if point == ADVANCE:
            passes = draw.randint(1, _MOST_STATEMENTS)
        served.start(kill_at=(point, passes))
        deadline = time.monotonic() + _POINT_SECONDS + PATIENCE_TO_START_SECONDS
        last = sender.journal.answers + _POINT_ANSWERS
        while senders.is_alive() and time.monotonic() < deadline and sender.journal.answers < last:
            if served.wait_for_end(0.05):
                self._used[point] += 1
                return point
        return "random, point not reached"
