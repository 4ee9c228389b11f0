"""Engines that held other weights than the announced ones: vLLM samples with them, and the doctor must find them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.partial_sync import (
    ANNOUNCED,
    STEP,
    TIED,
    TIED_STEPS,
    checkpoint_folder,
    rollouts_file,
    tied_folder,
)
from benchmarks.recorded_runs import shipped_run
from benchmarks.truth.bench import Bench
from benchmarks.truth.case import Case, Outcome
from foreshock.probe_kinds import DOCTOR
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock_probes.engines.environment import offered_environments

# Also true: engine and trainer are two programs, and their small difference may be most of a mismatch.
_NUMERICS = ("numerics between engine and trainer",)
# The link that contains wrong weights, with its list of causes.
_THE_LINK = (*_NUMERICS, "weights that changed or were not fully synchronised")


def recorded(bench: Bench, *flags: str) -> Path:
    """Return the folder of faulty rollouts; an engine in a process of its own samples them once."""

    def record() -> Path:
        folder = bench.folder / "-".join(["partial-sync", *(flag.strip("-") for flag in flags)])
        command = [sys.executable, "-m", "benchmarks.partial_sync", str(folder), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"benchmarks.partial_sync failed:\n{done.stderr[-2000:]}")
        return folder

    return bench.once(f"partial-sync {flags}", record)


def search(
    bench: Bench,
    key: str,
    step: int,
    batch: RolloutBatch,
    checkpoints: dict[int, Path],
    **request: Any,
) -> Outcome:
    """Log the step with its checkpoints, let the doctor examine it, and return what is shown.

    `request` has further arguments of `Bench.probe`.
    """
    run = bench.log_run(key, {step: batch}, checkpoints=checkpoints, model_kind="dense")
    bench.probe(run, step, DOCTOR.default_scorers, kind=DOCTOR.name, **request)
    return bench.shown(run, step)


def fault(name: str, **request: Any) -> Callable[[Bench], Outcome]:
    """Return the function of a case of `benchmarks.partial_sync`; `request` has further arguments of `Bench.probe`."""

    def run(bench: Bench) -> Outcome:
        folder = recorded(bench)
        batch = decode_rollouts(rollouts_file(folder, name).read_bytes())
        checkpoints = {step: checkpoint_folder(folder, step) for step in ANNOUNCED}
        key = "-".join(["weights", name, *(f"{value}" for value in request.values())])
        return search(bench, key, STEP, batch, checkpoints, **request)

    return run


def without_the_true_candidate(bench: Bench) -> Outcome:
    """Announce only steps whose head the engine did not hold."""
    folder = recorded(bench)
    batch = decode_rollouts(rollouts_file(folder, "head_of_first").read_bytes())
    checkpoints = {step: checkpoint_folder(folder, step) for step in (45, 160, STEP)}
    return search(bench, "weights-not-announced", STEP, batch, checkpoints)


def tied(bench: Bench) -> Outcome:
    """Reload a model with tied embeddings in place by vLLM's own method."""
    folder = recorded(bench, "--tied")
    batch = decode_rollouts(rollouts_file(folder, TIED).read_bytes())
    checkpoints = {step: tied_folder(folder, step) for step in TIED_STEPS}
    return search(bench, "weights-tied", TIED_STEPS[-1], batch, checkpoints)


def recorded_run(bench: Bench) -> Outcome:
    """Examine the last step of the shipped run, whose engine held the announced weights, in the nearest environment."""
    run = shipped_run()
    last = run.steps()[-1]
    checkpoints = {step: run.checkpoint(step) for step in run.steps()}
    rollouts = run.rollouts(last)
    return search(bench, "weights-recorded", last, rollouts, checkpoints, environment=run.environment.nearest())


# An engine held to the lowest instruction set rounds differently, unless the machine has no other set.
_ELSEWHERE = next(iter(offered_environments()), None)

CASES = (
    Case("right weights", None, True, fault("right"), _NUMERICS),
    Case("one step behind", "the weights step 160", True, fault("one_step_behind"), _THE_LINK),
    Case("the first step's weights", "the weights step 1", True, fault("first_step"), _THE_LINK),
    Case("stale head of the first step", "with the lm_head of step 1", True, fault("head_of_first"), _THE_LINK),
    Case("stale head of a middle step", "with the lm_head of step 45", True, fault("head_of_middle"), _THE_LINK),
    Case("stale embeddings", "with the embeddings of step 1", True, fault("embeddings_of_first"), _THE_LINK),
    Case("stale layer", "with layer 1 of step 45", True, fault("layer_of_middle"), _THE_LINK),
    Case("stale head, not announced", "lm_head of step 1", False, without_the_true_candidate, _THE_LINK),
    Case("tied head left stale by a reload", "with the lm_head of step 1", True, tied, _THE_LINK),
    Case("the recorded run's weights", None, True, recorded_run, (*_NUMERICS, "environment")),
    *(
        (
            Case(
                "stale head, replayed in another environment",
                "lm_head of step 1",
                False,
                fault("head_of_first", environment=_ELSEWHERE),
                (*_THE_LINK, "environment"),
            ),
            Case(
                "right weights, replayed in another environment",
                None,
                True,
                fault("right", environment=_ELSEWHERE),
                (*_NUMERICS, "environment"),
            ),
        )
        if _ELSEWHERE is not None
        else ()
    ),
)
