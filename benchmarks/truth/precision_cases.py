"""Precision and sample size: trainers of known precision over the shipped run's rollouts, through real vLLM and torch.

log μ is vLLM's replay and log π is a torch forward pass in the precision of the case, both in the run's environment.
The engine's link is therefore 0, and all of the mismatch is the trainer's precision against the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.recorded_runs import shipped_run
from benchmarks.truth.bench import Bench
from benchmarks.truth.case import Case, Outcome
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.scores import ScoreBatch
from foreshock.scorers import ENGINE_REPLAY, REFERENCE, TRAINER_REPLAY

FLOAT32 = {"autocast": None, "master_dtype": "float32"}
BFLOAT16 = {"autocast": None, "master_dtype": "bfloat16"}
AUTOCAST = {"autocast": "bfloat16", "master_dtype": "float32"}
_SCORERS = (ENGINE_REPLAY, TRAINER_REPLAY, REFERENCE)
_NUMERICS = "numerics between engine and trainer"


def logged(bench: Bench, precision: Mapping[str, Any], step: int, *, declared: bool) -> RolloutBatch:
    """Return the rollouts of a step with log μ by vLLM, and log π by a trainer of this precision."""
    run = shipped_run()
    batch, weights, environment = run.rollouts(step), run.checkpoint(step), run.environment.nearest()

    def scored(scorer: str, options: Mapping[str, Any]) -> ScoreBatch:
        key = f"precision {scorer} {sorted(map(str, options.items()))} {step}"
        return bench.once(key, lambda: bench.score(scorer, batch, weights, options, environment))

    engine, trainer = scored(ENGINE_REPLAY, {}), scored(TRAINER_REPLAY, precision)
    # The fingerprint of a run that does not declare its trainer's precision.
    undeclared = replace(trainer.fingerprint, dtype=None, master_dtype=None, autocast=None, head_dtype=None)
    return replace(
        batch,
        rollout_log_probs=engine.log_probs,
        trainer_log_probs=trainer.log_probs,
        attributes=replace(
            batch.attributes,
            engine_fingerprint=engine.fingerprint,
            trainer_fingerprint=trainer.fingerprint if declared else undeclared,
        ),
    )


def trainer(
    name: str,
    precision: Mapping[str, Any],
    *,
    requested: Mapping[str, Any] | None = None,
    prompts: int | None = None,
    step: int = 0,
    declared: bool = False,
) -> Callable[[Bench], Outcome]:
    """Return a case's function: a trainer of this precision, probed as `requested`, over only the first `prompts`."""

    def case(bench: Bench) -> Outcome:
        run = shipped_run()
        chosen = step or run.steps()[-1]
        batch = logged(bench, precision, chosen, declared=declared)
        if prompts is not None:
            names = list(dict.fromkeys(batch.group_ids or ()))[:prompts]
            batch = batch.select([row for row, group in enumerate(batch.group_ids or ()) if group in names])
        checkpoints = {chosen: run.checkpoint(chosen)}
        of_run = bench.log_run(f"precision-{name}", {chosen: batch}, checkpoints=checkpoints, model_kind="dense")
        options = {TRAINER_REPLAY: dict(requested)} if requested is not None else None
        bench.probe(of_run, chosen, _SCORERS, options=options, environment=run.environment.nearest())
        return bench.shown(of_run, chosen)

    return case


_IN_FLOAT32 = "The trainer computes in float32"
_FIRST, _MIDDLE, _LAST = shipped_run().steps()

CASES = (
    Case("trainer float32, default probe", _IN_FLOAT32, True, trainer("float32", FLOAT32)),
    Case("trainer float32, asked again", _NUMERICS, True, trainer("float32-again", FLOAT32, requested=FLOAT32)),
    Case("trainer float32, declared", _NUMERICS, True, trainer("float32-declared", FLOAT32, declared=True)),
    Case("trainer bfloat16 pure, declared", _NUMERICS, True, trainer("bfloat16-declared", BFLOAT16, declared=True)),
    Case("trainer float32, middle step", _IN_FLOAT32, True, trainer("float32-middle", FLOAT32, step=_MIDDLE)),
    Case("trainer float32, few rollouts", _IN_FLOAT32, True, trainer("float32-few", FLOAT32, prompts=4)),
    Case("trainer bfloat16 pure, asked so", _NUMERICS, True, trainer("bfloat16", BFLOAT16, requested=BFLOAT16)),
    Case(
        "trainer bfloat16 pure, default probe", "trainer against replay", False, trainer("bfloat16-default", BFLOAT16),
        (_NUMERICS,),
    ),
    Case("trainer autocast", _NUMERICS, True, trainer("autocast", AUTOCAST)),
    Case("trainer autocast, first step", _NUMERICS, True, trainer("autocast-first", AUTOCAST, step=_FIRST)),
    Case("trainer autocast, 4 prompts", "Cannot tell", True, trainer("autocast-4", AUTOCAST, prompts=4)),
    Case(
        "trainer bfloat16 pure, default probe, 4 prompts", "Cannot tell", True,
        trainer("bfloat16-4", BFLOAT16, prompts=4),
    ),
)  # fmt: skip
