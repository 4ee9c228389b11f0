"""Six checkpoints through `vllm.prefill` against one checkpoint six times, by one worker whose engine is warm.

Both sides are a run with six steps that have the same 128 recorded rollouts, so that a job scores the same tokens. In
the run "six checkpoints" each step has its own weights: the three of the recorded run, and the three means of two of
them, since the repository ships three. In the run "one checkpoint" all six steps have the same weights. A worker does
the six jobs of a run: lease, rollouts, weights loaded in place and verified, scores, upload, complete.

The engine computes with one thread, as when the run was recorded: the service needs the other core, and threads that
spin while they wait for a descheduled one made a side take up to five times as long on a machine with other work.

The time of a side is that from the grant of its first lease to the end of its last one, by the database's clock. The
engine has been started, and has scored a job of each side, before anything is timed; it holds the last of the six
weights when a timed side begins, so that each of the six jobs loads other weights. The two sides alternate, and so
does the first of them. Bar: the median over the rounds of six checkpoints / one checkpoint six times is below 1.3.

Beside it, over the same jobs: seconds in the engine (loading, verification, scoring) and CPU seconds of the engine's
process, which other programs on the machine hardly change.

`total / one`: the time of six checkpoints over that of one job of the other side. Six jobs score six times the tokens,
so that it is at least 6 if nothing is saved by doing jobs together.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import httpx
import psutil

from benchmarks.jobs.probed_runs import ROOT, ProbedRun, rows
from benchmarks.recorded_runs import shipped_run
from benchmarks.replay import ENGINE_REPLAY
from benchmarks.running_service import running_service
from foreshock.rollouts import RolloutBatch
from foreshock_probes.console import WorkerConsole
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.process import EnginePool
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.scorers.request import Report
from foreshock_probes.settings import WorkerSettings
from foreshock_probes.worker import Worker

CHECKPOINTS = 6
BAR = 1.3


@dataclass(frozen=True, slots=True)
class Side:
    """Six jobs: seconds from the first lease to the end of the last, in the engine, of its CPU; and of each lease."""

    seconds: float
    engine_seconds: float
    cpu_seconds: float
    each: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Both sides, one after the other."""

    six: Side
    one: Side

    @property
    def ratio(self) -> float:
        return self.six.seconds / self.one.seconds

    @property
    def engine_ratio(self) -> float:
        return self.six.engine_seconds / self.one.engine_seconds

    @property
    def cpu_ratio(self) -> float:
        return self.six.cpu_seconds / self.one.cpu_seconds


class TimedEngines(EnginePool):
    """Engines that add up their seconds and the CPU seconds of their processes."""

    seconds = 0.0
    cpu_seconds = 0.0

    def score(
        self,
        command: ScoreCommand,
        report: Report,
        abandoned: Callable[[], bool] = lambda: False,
        environment: EngineEnvironment = AS_IT_IS,
    ) -> float:
        """Run `command` and note how long it took."""
        before = self._cpu_seconds()
        taken = super().score(command, report, abandoned, environment)
        self.seconds += taken
        self.cpu_seconds += self._cpu_seconds() - before
        return taken

    def _cpu_seconds(self) -> float:
        times = [psutil.Process(number).cpu_times() for number in self.process_ids().values()]
        return sum(each.user + each.system for each in times)


def measure(rounds: int) -> list[Round]:
    """Return the rounds, with one engine for all."""
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the engine
    run = shipped_run()
    rollouts = run.rollouts(run.steps()[-1])
    with tempfile.TemporaryDirectory(prefix="foreshock-jobs-") as name:
        folder = Path(name)
        root = folder / "weights"
        paths = make_checkpoints(root)
        (folder / "service").mkdir()
        (folder / "engines").mkdir()
        engines = TimedEngines(folder / "engines")
        try:
            with (
                running_service(folder / "service", FORESHOCK_DECODE_PROCESSES="1") as url,
                httpx.Client(base_url=url, timeout=120) as http,
            ):
                bench = _Bench(http, url, folder / "service", root, rollouts, engines)
                bench.side([paths[0]])
                bench.side(paths)  # the engine is warm, and has loaded weights in place
                found = []
                for number in range(rounds):
                    sides = {}
                    for kind in ("six", "one") if number % 2 == 0 else ("one", "six"):
                        bench.side([paths[-1]])
                        sides[kind] = bench.side(paths if kind == "six" else [paths[-1]] * CHECKPOINTS)
                    found.append(Round(**sides))
                    print(line_of(number, found[-1]), flush=True)
                return found
        finally:
            engines.close()


def line_of(number: int, each: Round) -> str:
    """Return a line of the table of rounds."""
    single = statistics.median(each.one.each)
    seconds = f"{each.six.seconds:>12.3f}{each.one.seconds:>12.3f}{single:>12.3f}"
    return f"{number:>5}{seconds}{each.ratio:>9.3f}{each.engine_ratio:>9.3f}{each.cpu_ratio:>9.3f}"


def make_checkpoints(root: Path) -> list[str]:
    """Write six checkpoints of the recorded run's model below `root`; return their folders' names, no two alike."""
    import torch
    from safetensors.torch import load_file, save_file

    run = shipped_run()
    recorded = [run.checkpoint(step) for step in run.steps()]
    names = []
    for source in recorded:
        shutil.copytree(source, root / source.name)
        names.append(source.name)
    for first, second in zip(recorded, [*recorded[1:], recorded[0]], strict=True):
        name = f"{first.name}_{second.name}"
        (root / name).mkdir()
        shutil.copy(first / "config.json", root / name)
        weights, others = (load_file(folder / "model.safetensors") for folder in (first, second))
        mean = {key: torch.lerp(value, others[key], 0.5) for key, value in weights.items()}
        save_file(mean, root / name / "model.safetensors", metadata={"format": "pt"})
        names.append(name)
    assert len(names) == CHECKPOINTS
    return names


class _Bench:
    """Makes runs and has a worker do their jobs."""

    def __init__(
        self, http: httpx.Client, url: str, service: Path, root: Path, rollouts: RolloutBatch, engines: TimedEngines
    ) -> None:
        self._http, self._root, self._rollouts, self._engines = http, root, rollouts, engines
        self._database = service / "foreshock-data" / "foreshock.db"
        self._settings = WorkerSettings(url=url, weights_roots={ROOT: root}, accelerator="cpu")

    def side(self, paths: Sequence[str]) -> Side:
        """Probe a step for each of `paths`, the checkpoints, and return the times of the jobs."""
        run = ProbedRun.start(self._http, self._root)
        for step, path in enumerate(paths, 1):
            run.log_step(step, self._rollouts)
            run.announce(step, path)
        for step in range(1, len(paths) + 1):
            run.probe(step, [ENGINE_REPLAY])
        self._wait_until_quiet()
        self._engines.seconds = self._engines.cpu_seconds = 0.0
        console = StringIO()
        worker = Worker(self._settings, WorkerConsole(console), scorers=(ENGINE_REPLAY,), engines=self._engines)
        worker.run(until_idle_seconds=0.0)
        leases = rows(
            self._database,
            "SELECT leases.granted_at_us, leases.ended_at_us, leases.outcome, probes.checkpoint FROM leases "
            "JOIN probe_jobs ON probe_jobs.id = leases.job_id JOIN probes ON probes.id = probe_jobs.probe_id "
            "WHERE probes.run_id = ? ORDER BY leases.granted_at_us",
            [run.run],
        )
        held = [json.loads(lease["checkpoint"])["path"] for lease in leases]
        if [lease["outcome"] for lease in leases] != ["completed"] * len(paths) or held != list(paths):
            raise RuntimeError(f"the jobs did not end as expected: {leases}\n{console.getvalue()}")
        each = tuple((lease["ended_at_us"] - lease["granted_at_us"]) / 1e6 for lease in leases)
        seconds = (leases[-1]["ended_at_us"] - leases[0]["granted_at_us"]) / 1e6
        return Side(seconds, self._engines.seconds, self._engines.cpu_seconds, each)

    def _wait_until_quiet(self) -> None:
        """Wait until the service has attributed what earlier jobs scored."""
        while rows(self._database, "SELECT 1 FROM attributions WHERE stale LIMIT 1"):
            time.sleep(0.2)


def report(found: Sequence[Round]) -> tuple[bool, dict[str, str]]:
    """Return whether the bar is reached, and the figures."""
    ratio = statistics.median(each.ratio for each in found)
    six = statistics.median(each.six.seconds for each in found)
    single = statistics.median(seconds for each in found for seconds in each.one.each)
    total_over_one = statistics.median(each.six.seconds / statistics.median(each.one.each) for each in found)
    figures = {
        "six_checkpoints_over_one_six_times": f"{ratio:.3f}",
        "least": f"{min(each.ratio for each in found):.3f}",
        "largest": f"{max(each.ratio for each in found):.3f}",
        "in_engine": f"{statistics.median(each.engine_ratio for each in found):.3f}",
        "engine_cpu": f"{statistics.median(each.cpu_ratio for each in found):.3f}",
        "six_checkpoints_seconds": f"{six:.3f}",
        "one_job_seconds": f"{single:.3f}",
        "total_over_one": f"{total_over_one:.2f}",
        "rounds": str(len(found)),
    }
    return ratio < BAR, figures


def main(rounds: int) -> tuple[bool, dict[str, str]]:
    """Measure and print; return whether the bar is reached, and the figures."""
    print(f"{'round':>5}{'six, s':>12}{'one × 6, s':>12}{'one, s':>12}{'ratio':>9}{'engine':>9}{'its CPU':>9}")
    return report(measure(rounds))
