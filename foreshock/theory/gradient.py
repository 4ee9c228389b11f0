"""The gradient noise, estimated from norms, and its cost for a step of size η.

A step's gain is at least η(1 − Lη/2)‖∇J‖² + η(1 − Lη)⟨∇J, Bias⟩ − (Lη²/2)·[Var + ‖Bias‖²] (SGA lemma, Li et al., *When
Speed Kills Stability*, part 1). Norms give Var and not ⟨∇J, Bias⟩; halving η quarters the cost of Var.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foreshock.theory.bounds import require

__all__ = ["GradientNoise", "GradientNorms", "StepNoise", "gradient_noise", "step_noise"]


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Norms of mean gradients before clipping, over parts of a batch that are split by prompt.

    `micro_batch` is the root of the mean square of ‖g_b‖ over micro-batches of `micro_batch_prompts` prompts each;
    `batch` is ‖g_B‖ of the mean over all `batch_prompts` prompts.
    """

    micro_batch: float
    batch: float
    micro_batch_prompts: float
    batch_prompts: float


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """The variance V̂ of the gradient of one prompt (trace of its covariance), and the signal ‖E g‖².

    `of_batch` is V̂ / B, the variance of the batch's gradient. `batch_prompts_for_parity` = V̂ / signal is the simple
    noise scale: the batch whose noise equals its signal; NaN if the signal is not positive. `variance` and `signal` may
    be negative by chance and are not clamped. Source: McCandlish et al. 2018, *An Empirical Model of Large-Batch
    Training*, appendix A.
    """

    variance: float
    of_batch: float
    signal: float
    batch_prompts_for_parity: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepNoise:
    """The noise term (η²/2)·[Var + ‖Bias‖²] of the SGA lemma per unit of L, at η and at η/2 (a quarter).

    With a bias of 0 it is the part of the variance.
    """

    learning_rate: float
    at_learning_rate: float
    at_half: float
    bias_norm: float


def gradient_noise(norms: GradientNorms) -> GradientNoise:
    """Return V̂ = (‖g_b‖² − ‖g_B‖²) / (1/b − 1/B) and what follows from it.

    Raises InvalidArgumentError for norms that are negative or whose squares are not finite, and unless 1 ≤ b < B.
    """
    for name in ("micro_batch", "batch"):
        norm = getattr(norms, name)
        require(math.isfinite(norm) and norm >= 0.0, f"a norm must be a finite number of at least 0, got {norm}", name)
        require(
            math.isfinite(norm * norm), f"the square of a norm must be a finite float64, got a norm of {norm}", name
        )
    small, large = norms.micro_batch_prompts, norms.batch_prompts
    require(math.isfinite(small) and small >= 1.0, f"must be at least 1, got {small}", "micro_batch_prompts")
    require(
        math.isfinite(large) and large > small,
        f"must be more than the {small} prompts of a micro-batch, got {large}",
        "batch_prompts",
    )
    of_small, of_large = norms.micro_batch**2, norms.batch**2
    variance = (of_small - of_large) / (1.0 / small - 1.0 / large)
    signal = (large * of_large - small * of_small) / (large - small)
    notes = (
        ("V̂ is negative: by chance, or because the micro-batches are not split by prompt",) if variance < 0.0 else ()
    )
    parity = variance / signal if signal > 0.0 else math.nan
    return GradientNoise(variance, variance / large, signal, parity, notes)


def step_noise(learning_rate: float, variance: float, bias_norm: float = 0.0) -> StepNoise:
    """Return the noise term at η and at η/2; `variance` is that of the gradient of the step, V̂ / B.

    Raises InvalidArgumentError for a learning rate or a bias that is negative or not finite.
    """
    for value, argument in ((learning_rate, "learning_rate"), (bias_norm, "bias_norm")):
        require(math.isfinite(value) and value >= 0.0, f"must be finite and at least 0, got {value}", argument)
    square = variance + bias_norm * bias_norm
    half = 0.5 * learning_rate
    return StepNoise(learning_rate, 0.5 * learning_rate * learning_rate * square, 0.5 * half * half * square, bias_norm)
