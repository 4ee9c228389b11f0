"""Check that new weights arrived in the engine after a reload.

An engine that keeps old weights, or a part of them, raises no error: the run goes on, its mismatch grows with the
learning rate, and that looks like numerics. So after every reload a fixed set of sequences is scored by the engine
and, in float32, by the trainer, and two things must hold:

- the engine **moved with the trainer**: over the set, the change of its log-probs since a few reloads ago, regressed
  on the trainer's change, has a slope near 1. A stale engine has slope 0, one with a stale part lies between;
- the two **agree** as well as bfloat16 does with float32.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3ForCausalLM

from examples.tiny_rl.policy import next_token_log_probs, pad
from examples.tiny_rl.sampler import Samples
from examples.tiny_rl.task import END_OF_SEQUENCE, draw_problem, encode

LARGEST_MEAN_DIFFERENCE = 0.1
"""Nats per token. Measured between vLLM's bfloat16 and torch's float32 on this model: 0.001 to 0.01."""
SMALLEST_SLOPE = 0.5
STANDARD_ERRORS = 4.0
"""Standard errors that the slope must lie below the bound before it counts: rounding hides a tiny update."""
VISIBLE_CHANGE = 0.02
"""Nats. If the trainer's log-prob of any token moved this far, bfloat16 cannot hide the change in every token."""
REMEMBERED_RELOADS = 8
"""Reloads over which the change is taken; over several reloads it is far larger than rounding."""


class StaleWeightsError(RuntimeError):
    """The engine does not hold the weights of the last reload."""


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """Agreement of engine and trainer on the fixed set of sequences."""

    mean_difference: float
    """Mean |engine's log-prob − log-prob of the trainer's weights in float32| over the tokens, nats."""
    slope: float
    """Slope of the engine's change on the trainer's; 1 is a full reload, NaN before the second check."""
    slope_error: float


class ReloadCheck:
    """Scores a fixed set of right answers, direct and worked ones, after each reload."""

    def __init__(self, sampler: Samples, model: Qwen3ForCausalLM, seed: int, sequences: int = 32) -> None:
        random_source = random.Random(seed)
        problems = [draw_problem(random_source) for _ in range(sequences)]
        texts = [
            problem.worked_answer() if index % 2 else problem.direct_answer() for index, problem in enumerate(problems)
        ]
        self._sampler = sampler
        self._prompts: Sequence[list[int]] = [problem.prompt_token_ids for problem in problems]
        self._responses: Sequence[list[int]] = [[*encode(text), END_OF_SEQUENCE] for text in texts]
        self._batch = pad(self._prompts, self._responses)
        engine, trainer = self._scores(model)
        self._refuse_disagreement(engine, trainer)
        self._before = deque([(engine, trainer)], maxlen=REMEMBERED_RELOADS)

    def after_reload(self, model: Qwen3ForCausalLM) -> ReloadReport:
        """Compare engine and trainer. Raises StaleWeightsError if the engine holds old weights."""
        engine, trainer = self._scores(model)
        mean_difference = self._refuse_disagreement(engine, trainer)
        engine_then, trainer_then = self._before[0]
        slope, slope_error = regression_slope(trainer - trainer_then, engine - engine_then)
        engine_last, trainer_last = self._before[-1]
        self._before.append((engine, trainer))
        if np.array_equal(engine, engine_last) and np.abs(trainer - trainer_last).max() > VISIBLE_CHANGE:
            raise StaleWeightsError(
                "the engine did not take the new weights: it gives the very same log-probs as before"
            )
        if slope + STANDARD_ERRORS * slope_error < SMALLEST_SLOPE:
            raise StaleWeightsError(
                f"the engine did not take the new weights: its log-probs moved by {slope:.2f} ± {slope_error:.2f} of "
                "what the trainer's moved by. Are the embeddings tied? On CPU a tied head can stay stale."
            )
        return ReloadReport(mean_difference, slope, slope_error)

    def _scores(self, model: Qwen3ForCausalLM) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        engine = np.asarray(self._sampler.score(self._prompts, self._responses))
        with torch.no_grad():
            # In float32: rounding noise in the trainer's change would bias the slope towards 0.
            log_probs, _ = next_token_log_probs(model, self._batch, autocast=False)
        return engine, log_probs[self._batch.response_mask].double().numpy()

    def _refuse_disagreement(self, engine: NDArray[np.float64], trainer: NDArray[np.float64]) -> float:
        difference = float(np.mean(np.abs(engine - trainer)))
        if not difference <= LARGEST_MEAN_DIFFERENCE:
            raise StaleWeightsError(
                f"engine and trainer differ by {difference:.3g} nats a token on the fixed set, which rounding does not "
                f"explain (limit {LARGEST_MEAN_DIFFERENCE}): the engine holds other weights than the trainer."
            )
        return difference


def regression_slope(cause: NDArray[np.float64], effect: NDArray[np.float64]) -> tuple[float, float]:
    """Return the least-squares slope through the origin of `effect` on `cause`, [T] each, and its standard error.

    The error is White's (HC0): rounding is larger for the rare tokens that move most. Both are NaN if `cause` is 0.
    """
    power = float(cause @ cause)
    if power == 0.0:
        return float("nan"), float("nan")
    slope = float(cause @ effect) / power
    residual = effect - slope * cause
    return slope, float(np.linalg.norm(cause * residual)) / power
