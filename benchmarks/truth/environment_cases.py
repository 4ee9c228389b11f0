"""Replays in the run's environment and in others, with real vLLM and torch that are held to an instruction set. The
shipped run was sampled on an AMD CPU with AVX2; some cases give it other fingerprints or none.

The truth: engine and trainer differ in their numerics, and a replay in the run's own environment reproduces the logged
values bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.recorded_runs import SHIPPED, RecordedRun, recorded_runs, shipped_run
from benchmarks.truth.bench import Bench
from benchmarks.truth.case import Case, Outcome
from examples.tiny_rl.record import RunRecord
from foreshock.environment import InstructionSet, environment_name
from foreshock.process_fingerprint import mkl_kernels
from foreshock.rollouts import RolloutBatch
from foreshock.scorers import ENGINE_REPLAY, TRAINER_REPLAY
from foreshock_probes.engines.environment import (
    AS_IT_IS,
    EngineEnvironment,
    available_instruction_sets,
    offered_environments,
)

# True of all these runs, so it may be named beside any other cause.
_NUMERICS = "numerics between engine and trainer"
_SCORERS = (ENGINE_REPLAY, TRAINER_REPLAY)

Fingerprints = Mapping[str, Any]


def own_fingerprints() -> Fingerprints:
    """Return the fingerprints of the shipped run's engine and trainer."""
    return RunRecord(SHIPPED).manifest().fingerprints()


def claimed() -> Fingerprints:
    """Return the run's fingerprints with the instruction set of another CPU than the one that sampled."""
    flags = {"cpu_features": "amx_tile avx512 avx512_bf16 vnni", "mkl_kernels": "intel"}
    return {
        name: {**values, "device_name": "Intel(R) Xeon(R)", "cpu_isa": "AVX512", "flags": flags}
        for name, values in own_fingerprints().items()
    }


def without_fingerprint(batch: RolloutBatch) -> RolloutBatch:
    """Return rollouts whose batch does not name the engine that sampled them."""
    return replace(batch, attributes=replace(batch.attributes, engine_fingerprint=None, trainer_fingerprint=None))


def replayed(
    name: str,
    fingerprints: Fingerprints,
    *replays: tuple[int, str | None],
    run: RecordedRun | None = None,
    sampled: Mapping[int, int] | None = None,
) -> Callable[[Bench], Outcome]:
    """Return a case's function: log steps with these fingerprints, and replay each in an environment.

    `sampled` maps a step to the step whose weights sampled its rollouts, if it announces other weights.
    """

    def case(bench: Bench) -> Outcome:
        recorded = run or shipped_run()
        steps = {step: without_fingerprint(recorded.rollouts((sampled or {}).get(step, step))) for step, _ in replays}
        checkpoints = {step: recorded.checkpoint(step) for step in steps}
        logged = bench.log_run(
            f"environment-{name}", steps, checkpoints=checkpoints, model_kind="dense", fingerprint=fingerprints
        )
        for step, environment in replays:
            bench.probe(logged, step, _SCORERS, environment=environment or AS_IT_IS)
        return bench.shown(logged, replays[-1][0])

    return case


def unknown_run(run: RecordedRun) -> Callable[[Bench], Outcome]:
    """Return a case's function: a recorded run without fingerprints, replayed where it is reproduced bit for bit."""
    held = run.environment.nearest()
    assert held.instruction_set is not None
    name = environment_name(held.instruction_set, held.mkl or mkl_kernels())
    return replayed(run.name, {}, (run.steps()[1], name), run=run)


_NEAREST = shipped_run().environment.nearest()


def _name_of(environment: EngineEnvironment) -> str:
    return next((name for name, each in offered_environments().items() if each == environment), "any")


def _cases() -> tuple[Case, ...]:
    """Return the cases grouped by environment, because a change of environment starts both engines anew."""
    first, middle, last = shipped_run().steps()
    own, highest = _name_of(_NEAREST), available_instruction_sets()[-1]
    other = environment_name(highest, mkl_kernels())
    known = own_fingerprints()
    true_of_drift = ("engine sampling against replay", "trainer against replay", "weights", _NUMERICS)
    # The first step's replay has no mismatch; the last step announces other weights than those that sampled it.
    drift = replayed("drift", {}, (first, own), (last, own), sampled={last: middle})
    found = [
        _case("environment same, chosen by the service", _NUMERICS, replayed("same", known, (last, None))),
        _case("environment same, required", _NUMERICS, replayed("run", known, (middle, "run"))),
        _case("environment unknown, bit for bit equal", _NUMERICS, replayed("equal", {}, (middle, own))),
        _case("environment unknown, drift", "drift", drift, true_of_drift),
    ]
    if highest is InstructionSet.AVX2:
        return tuple(found)
    differs = "the CPU's instruction set: AVX2 at sampling, AVX-512"
    both = replayed("two", known, (last, own), (last, other))
    found += [
        _case("fingerprint of another CPU, equal", _NUMERICS, replayed("claimed", claimed(), (middle, own))),
        _case("two environments, one is the run's", "environment-measured", both),
    ]
    found += [
        _case(f"environment differs, step {step}", differs, replayed(f"differs-{step}", known, (step, other)))
        for step in (first, middle, last)
    ]
    found.append(_case("environment unknown, another", "environment-unknown", replayed("unknown", {}, (last, other))))
    found += [
        _case(f"run {run.name} without fingerprints, equal", _NUMERICS, unknown_run(run))
        for run in recorded_runs()
        if run.name != "recorded" and run.environment.instruction_set in available_instruction_sets()
    ]
    unknown = environment_name(InstructionSet.AVX512, mkl_kernels())
    neither = replayed("neither", {}, (last, other), (last, unknown))
    clears_nothing = replayed("drift-two", {}, (first, own), (last, other), sampled={last: middle})
    return (
        *found,
        _case("two environments, neither is known to be the run's", "(an assumption)", neither),
        _case("drift between two environments clears nothing", "environment-unknown", clears_nothing),
    )


def _case(name: str, expected: str, run: Callable[[Bench], Outcome], also_true: tuple[str, ...] = (_NUMERICS,)) -> Case:
    return Case(name, expected, True, run, also_true)


CASES = _cases()
