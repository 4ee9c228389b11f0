"""A policy small enough to compute exactly what sampled estimators estimate.

A two-layer network over a vocabulary of 32 reads the prompt, the token before and a clock of eight phases, which keeps
it out of loops, and gives the next token's logits. One token is the stop token, so the length of a response is a
stopping time that depends on what was sampled; prompts differ in entropy and in length. `TinyPolicy.of(seed, bits)`
rounds every weight, activation and logit to that many significant bits (8: bfloat16): a mismatch of numerics, as
between an engine and a trainer.

A state is (prompt, phase, token before). For functions of state and token, E_μ[Σ f over a response] and E_μ[T] follow
by propagating the distribution over states step by step up to the length limit; their ratio is what a token mean
estimates, since prompts are drawn uniformly. None of it is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

PROMPTS = 256
PHASES = 8
VOCABULARY = 32
STOP = 0
HIDDEN = 32
LENGTH_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Traits:
    """Settings of a policy: how its prompts differ, and how heavy its tails are.

    `prompt_size`: of the prompt's part in the first layer, beside parts of size 1. `sharpness`: mean and spread of the
    logarithm of what logits are multiplied by. `stopping`: the same of the odds to stop. `outliers`: how much larger
    than others two of the 32 channels are.
    """

    prompt_size: float = 0.25
    sharpness: tuple[float, float] = (1.7, 0.15)
    stopping: tuple[float, float] = (-4.5, 0.5)
    outliers: float = 3.0


def rounded(values: Float64, bits: int | None) -> Float64:
    """Round `values` to `bits` significant bits; None leaves them unchanged."""
    if bits is None:
        return values
    significand, exponent = np.frexp(values)
    nearest: Float64 = np.ldexp(np.round(np.ldexp(significand, bits)), exponent - bits)
    return nearest


@dataclass(frozen=True, slots=True, eq=False)
class TinyPolicy:
    """log-probs [PROMPTS, PHASES, VOCABULARY, VOCABULARY] of the next token, the token before standing third.

    A response begins in phase 0, as if the stop token came before it.
    """

    log_probs: Float64

    @classmethod
    def of(cls, seed: int, bits: int | None = None, traits: Traits | None = None) -> TinyPolicy:
        """Return the policy of a seed, rounded to `bits` significant bits."""
        traits = traits or Traits()
        random = np.random.default_rng(seed)
        of_tokens = random.normal(size=(VOCABULARY, HIDDEN))
        of_phases = random.normal(size=(PHASES, 1, HIDDEN))
        of_prompts = random.normal(0.0, traits.prompt_size, size=(PROMPTS, 1, 1, HIDDEN))
        middle = random.normal(0.0, 2.0 / np.sqrt(HIDDEN), size=(HIDDEN, HIDDEN))
        head = random.normal(0.0, 1.0 / np.sqrt(HIDDEN), size=(HIDDEN, VOCABULARY))
        head[:2] *= traits.outliers
        sharpness = np.exp(random.normal(*traits.sharpness, PROMPTS))[:, None, None, None]
        stopping = random.normal(*traits.stopping, PROMPTS)[:, None, None]
        read = rounded(of_tokens, bits) + rounded(of_phases, bits) + rounded(of_prompts, bits)
        first = rounded(np.tanh(rounded(read, bits)), bits)
        second = rounded(np.tanh(rounded(first @ rounded(middle, bits), bits)), bits)
        logits = sharpness * (second @ rounded(head, bits))
        # The odds to stop are those of the prompt, and lean a little on the state.
        others = logits[..., 1:]
        logits[..., STOP] = others.max(axis=-1) + stopping + 0.25 * logits[..., STOP] / sharpness[..., 0]
        logits = rounded(logits, bits)
        logits -= logits.max(axis=-1, keepdims=True)
        return cls(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))

    def expectations(self, values: Float64) -> tuple[Float64, float]:
        """Return E_μ[Σ_t values], [K], and E_μ[T] over uniformly drawn prompts; `values` are [*log_probs.shape, K]."""
        probabilities = np.exp(self.log_probs)
        onward = probabilities.copy()
        onward[..., STOP] = 0.0
        visits = np.zeros(probabilities.shape[:3])
        here = np.zeros((PROMPTS, 1, VOCABULARY))
        here[:, 0, STOP] = 1.0
        for step in range(LENGTH_LIMIT):
            phase = step % PHASES
            visits[:, phase] += here[:, 0]
            here = here @ onward[:, phase]
        weights = (visits[..., None] * probabilities).reshape(-1)
        return weights @ values.reshape(weights.size, -1) / PROMPTS, float(visits.sum()) / PROMPTS


@dataclass(frozen=True, slots=True, eq=False)
class Sampler:
    """Draws tokens from a policy by Walker's alias method: `keep` and `alias` [states · VOCABULARY]."""

    keep: Float64
    alias: Int64

    @classmethod
    def of(cls, policy: TinyPolicy) -> Sampler:
        """Build the alias tables of `policy`."""
        keep = np.exp(policy.log_probs).reshape(-1, VOCABULARY) * VOCABULARY
        alias = np.tile(np.arange(VOCABULARY), (keep.shape[0], 1))
        rows = np.arange(keep.shape[0])
        settled = np.zeros(keep.shape, dtype=np.bool_)
        for _ in range(VOCABULARY - 1):
            small = np.where(settled, np.inf, keep).argmin(axis=1)
            large = np.where(settled, -np.inf, keep).argmax(axis=1)
            settled[rows, small] = True
            alias[rows, small] = large
            keep[rows, large] -= np.where(small == large, 0.0, 1.0 - keep[rows, small])
        return cls(keep.ravel(), alias.ravel())

    def responses(self, prompts: Int64, random: np.random.Generator) -> Iterator[tuple[Int64, Int64]]:
        """Step by step the rollouts [n] that still run, and the place of what each sampled in `log_probs.ravel()`."""
        running = np.arange(prompts.size)
        before = np.full(prompts.size, STOP)
        for step in range(LENGTH_LIMIT):
            states = (prompts[running] * PHASES + step % PHASES) * VOCABULARY + before
            slots = random.integers(0, VOCABULARY, running.size)
            places = states * VOCABULARY + slots
            kept = random.random(running.size) < self.keep[places]
            tokens = np.where(kept, slots, self.alias[places])
            yield running, states * VOCABULARY + tokens
            onward = tokens != STOP
            running, before = running[onward], tokens[onward]
            if running.size == 0:
                return
