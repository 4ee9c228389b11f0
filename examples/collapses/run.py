"""One run: sample, reward, update, give the sampler its weights; every step measured as Foreshock measures it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from examples.collapses.fixed_set import FixedSet
from examples.collapses.grid import RunSettings
from examples.collapses.labels import label
from examples.collapses.sampling import Engines, EngineSource, ExactSource, Weights
from examples.tiny_rl.model import load_model
from examples.tiny_rl.rollouts import StepRollouts, sample_step
from examples.tiny_rl.task import draw_problem
from examples.tiny_rl.trainer import Correction, Trainer, TrainerOptions, Update
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.collapse import HELD_OBSERVATIONS
from foreshock.diagnosis.quantities import LEARNING_RATE_KEY, UPDATE_KEY
from foreshock.fingerprint import Fingerprint
from foreshock.learning_rate import applied_learning_rates, apply_scale
from foreshock.measures import measure_step

START = Path(__file__).parent / "start"
"""Warmed-up weights that all runs start from."""

SEED_STRIDE = 100_000


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: a value for each quantity and step (NaN if not measured), and how it ended."""

    steps: list[int]
    values: list[Mapping[str, float]]
    ended: str
    cpu_seconds: float
    wall_seconds: float


class Control:
    """What decides over the learning rate and the correction of a run; this one changes nothing."""

    measures_update = False
    """Whether each update is measured: one forward pass more."""

    def scale(self, step: int) -> float:
        """Return the multiple of the run's learning rate for the update of a step."""
        return 1.0

    def correction(self, rollouts: StepRollouts) -> Correction | None:
        """Return the correction of a step's update."""
        return None

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Take the measures of a step, after its update."""


class Laboratory:
    """What all runs of a process share: the engines and the models of the frozen scorer."""

    def __init__(self, start: Path = START) -> None:
        self._folder = start
        self._start_model, self._spare = _load(start), _load(start)
        self._start = _copy(self._start_model)
        self._engines = Engines(start)

    def run(
        self,
        settings: RunSettings,
        on_step: Callable[[int], None] = lambda step: None,
        control: Control | None = None,
    ) -> RunResult:
        """Make one run. Raises ReloadError if the engine does not take the start's weights."""
        control = control or Control()
        cpu, wall = time.process_time(), time.monotonic()
        model = _load(self._folder)
        trainer = Trainer(model, TrainerOptions(learning_rate=settings.learning_rate))
        source = self._source(settings, model)
        fixed = FixedSet(settings, self._start_model, self._spare)
        problems = random.Random(settings.seed)
        steps, values, ended = list[int](), list[Mapping[str, float]](), "all steps"
        for step in range(1, settings.steps + 1):
            on_step(step)
            seed = settings.seed * SEED_STRIDE + step
            measured = dict(fixed.evaluate(source, model, -seed)) if (step - 1) % settings.fixed_every == 0 else {}
            drawn = [
                draw_problem(problems, settings.fewest_digits, settings.most_digits) for _ in range(settings.prompts)
            ]
            torch.manual_seed(seed)
            rollouts = sample_step(step, source, drawn, settings.responses)
            width = settings.width if settings.dose.exact else 0
            apply_scale(trainer.optimizer, control.scale(step))
            (rate,) = applied_learning_rates(trainer.optimizer)
            correction = control.correction(rollouts)
            update = trainer.step(
                rollouts.prompts, rollouts.token_ids, rollouts.advantages, width, correction, control.measures_update
            )
            measured |= measures_of(rollouts, update, settings, source.version) | {LEARNING_RATE_KEY: rate}
            steps.append(step)
            values.append(measured)
            control.observe(step, measured)
            weights = _copy(model)
            if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
                ended = "weights not finite"
                break
            source.sync(step, weights)
            collapse = label(steps, [each["rollout:reward_mean"] for each in values])
            if collapse is not None and step >= collapse + HELD_OBSERVATIONS - 1 + settings.steps_after_collapse:
                ended = "collapsed"
                break
        return RunResult(steps, values, ended, time.process_time() - cpu, time.monotonic() - wall)

    def _source(self, settings: RunSettings, model: Qwen3ForCausalLM) -> EngineSource | ExactSource:
        if settings.dose.exact:
            return ExactSource(model, settings)
        sampler = self._engines.with_start(settings.dose.kv_cache_dtype, self._start)
        return EngineSource(sampler, settings, self._start)


def measures_of(rollouts: StepRollouts, update: Update, settings: RunSettings, version: int) -> dict[str, float]:
    """Return the step's values by the detectors' names: `trainer/rollout:…`, `rollout:…`, `scalars:…`.

    `version` counts the updates in the sampler's weights; the trainer's are those after step − 1 updates. Intervals by
    bootstrap are left out, and so is what is not estimable.
    """
    if settings.dose.exact and not np.array_equal(
        update.log_probs, np.concatenate([response.log_probs for response in rollouts.responses]).astype(np.float32)
    ):
        raise RuntimeError("log π must be log μ, bit for bit, if the trainer's pass samples")
    batch = rollouts.as_batch(update, Fingerprint(engine="sampler"), Fingerprint(engine="torch"))
    batch = replace(
        batch,
        weights_version=np.full(batch.num_tokens, version, np.int32),
        attributes=replace(
            batch.attributes, trainer_weights_version=rollouts.step - 1, length_cap=settings.max_response_tokens
        ),
    )
    measurement = measure_step(batch)
    found = {f"{STEP_ROW}:{name}": value for name, value in measurement.step.measures().items()}
    comparison = measurement.comparisons[TRAINER_ROLLOUT].statistics.measures()
    found |= {f"{TRAINER_ROLLOUT}:{name}": value for name, value in comparison.items()}
    found |= {"scalars:grad_norm": update.gradient_norm}
    if update.moved is not None:
        found[UPDATE_KEY] = update.moved
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _load(folder: Path) -> Qwen3ForCausalLM:
    model = load_model(folder)
    # Half the time of SDPA's backward pass on CPU at this size.
    model.set_attn_implementation("eager")
    return model


def _copy(model: Qwen3ForCausalLM) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
