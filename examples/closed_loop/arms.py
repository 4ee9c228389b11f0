"""What each arm does to the learning rate and to the weights of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from examples.closed_loop.plan import RATIO_CAP, Arm, Plan
from examples.collapses.results import Result
from examples.collapses.run import Control
from examples.tiny_rl.rollouts import StepRollouts
from examples.tiny_rl.trainer import Correction
from foreshock.backtest.replay import AppliedAdvice
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.quantities import LAST_STEP_KEY, LEARNING_RATE_KEY
from foreshock.learning_rate.control_loop import LoopSettings


def control_of(plan: Plan, finished: Callable[[Plan], Result]) -> Control:
    """Return the control of a run. ``finished`` gives the result of another run, which must be done."""
    steps = plan.settings.steps
    match plan.arm:
        case "advice":
            return FollowsAdvice(WarningConfiguration.for_model("dense"), steps)
        case "advice-mis":
            return FollowsAdvice(WarningConfiguration.for_model("dense"), steps, Corrects("sequence-mis"))
        case "length-decay":
            alone = replace(WarningConfiguration.for_model("dense"), loop=LoopSettings(enabled=False))
            return FollowsAdvice(alone, steps)
        case "tenth":
            return Scheduled([0.1] * steps)
        case "cosine":
            return Scheduled([0.5 * (1.0 + math.cos(math.pi * step / steps)) for step in range(steps)])
        case "matched":
            scales = scales_of(finished(plan.of("advice")))
            return Scheduled([math.fsum(scales) / len(scales)] * steps)
        case "sham":
            return Scheduled(scales_of(finished(plan.of("advice", plan.partner))))
        case "token-tis" | "sequence-mis":
            return Corrects(plan.arm)
        case _:
            return Control()


def scales_of(result: Result) -> list[float]:
    """Return the multiple of η₀ that each step of a run was made with."""
    # The file has the rates in float32.
    rates = result.columns[LEARNING_RATE_KEY].astype(np.float64)
    return [round(float(rate) / result.learning_rate, 6) for rate in rates]


class FollowsAdvice(Control):
    """The learning rate as Foreshock advises: the service's detectors, each decision from the next step on."""

    def __init__(self, configuration: WarningConfiguration, last_step: int, corrects: Control | None = None) -> None:
        self._advice, self._last_step = AppliedAdvice(configuration), float(last_step)
        self._corrects = corrects or Control()
        self.measures_update = configuration.loop.enabled

    def scale(self, step: int) -> float:
        return self._advice.scale(step)

    def correction(self, rollouts: StepRollouts) -> Correction | None:
        return self._corrects.correction(rollouts)

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        self._advice.observe(ClosedStep(step, {**values, LAST_STEP_KEY: self._last_step}))


class Scheduled(Control):
    """Scales that were fixed before the run; the last one holds for steps beyond them."""

    def __init__(self, scales: Sequence[float]) -> None:
        self._scales = scales

    def scale(self, step: int) -> float:
        return self._scales[min(step, len(self._scales)) - 1]


class Corrects(Control):
    """Truncated importance sampling of tokens, or masked importance sampling of sequences, at ρ = 2."""

    def __init__(self, arm: Arm) -> None:
        self._weights = token_weights if arm == "token-tis" else sequence_weights

    def correction(self, rollouts: StepRollouts) -> Correction:
        logged = [response.log_probs for response in rollouts.responses]

        def weights(log_pi: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            log_mu = torch.zeros_like(log_pi)
            log_mu[mask] = torch.tensor([value for row in logged for value in row], dtype=log_pi.dtype)
            return self._weights(torch.where(mask, log_pi - log_mu, 0.0))

        return weights


def token_weights(d: torch.Tensor) -> torch.Tensor:
    """Return min(ρ, C) of each token; ``d`` is log π − log μ [B, W], 0 where there is no token."""
    return d.exp().clamp(max=RATIO_CAP)


def sequence_weights(d: torch.Tensor) -> torch.Tensor:
    """Return ρ_seq · 1{ρ_seq ≤ C} for all tokens of each sequence; ``d`` as of `token_weights`."""
    ratio = d.sum(-1, keepdim=True).exp()
    return torch.where(ratio <= RATIO_CAP, ratio, 0.0).expand_as(d)
