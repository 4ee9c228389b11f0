"""Rollouts with known distributions for the lint's benchmark, with any sampling parameters and any kind of logging.

The engine is the policy of benchmarks/tiny_policy.py, sharpened and with odds to stop that give responses of about the
length wanted. The trainer is the same policy with noise on its logits, so that E ρ = 1 exactly. Rollouts are sampled
for many batches at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.tiny_policy import PHASES, PROMPTS, STOP, VOCABULARY, TinyPolicy, Traits
from foreshock.rollouts import BatchAttributes, RolloutBatch

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

SEED = 20261122


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The sampling parameters, applied to logits in the order in which engines apply them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def apply(self, log_probs: Float64) -> Float64:
        """Return the log-probs of the sampling distribution; −inf for a token cut off. Temperature 0 is greedy."""
        ordered = np.sort(log_probs, axis=-1)[..., ::-1]
        if self.temperature == 0.0:
            return np.where(log_probs >= ordered[..., :1], 0.0, -np.inf)
        tempered = normalised(log_probs / self.temperature)
        ordered = np.sort(tempered, axis=-1)[..., ::-1]
        least = np.full(tempered.shape[:-1], -np.inf)
        if self.top_k:
            least = np.maximum(least, ordered[..., self.top_k - 1])
        if self.min_p:
            least = np.maximum(least, ordered[..., 0] + np.log(self.min_p))
        if self.top_p < 1.0:
            before = np.cumsum(np.exp(ordered), axis=-1) - np.exp(ordered)
            kept = (before < self.top_p).sum(axis=-1)
            least = np.maximum(least, np.take_along_axis(ordered, kept[..., None] - 1, axis=-1)[..., 0])
        return normalised(np.where(tempered >= least[..., None], tempered, -np.inf))

    def attributes(self, logprobs_mode: str | None) -> BatchAttributes:
        """Return the batch attributes that declare these parameters."""
        return BatchAttributes(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or -1,
            min_p=self.min_p,
            logprobs_mode=logprobs_mode,  # type: ignore[arg-type]
        )


PLAIN = SamplingParameters()


@dataclass(frozen=True, slots=True)
class World:
    """An engine and a trainer.

    `sharpness` multiplies logits, `stopping` are the log odds to stop, `noise` is that on the trainer's logits.
    """

    sharpness: float = 1.0
    stopping: float = -4.5
    noise: float = 0.02
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The rollouts and prompts of a batch, and the length limit of a response in tokens."""

    rollouts: int = 128
    groups: int = 8
    limit: int = 200


def normalised(log_probs: Float64) -> Float64:
    """Return log-probs whose probabilities sum to 1 over the last axis."""
    most = log_probs.max(axis=-1, keepdims=True)
    return np.asarray(log_probs - most - np.log(np.exp(log_probs - most).sum(axis=-1, keepdims=True)))


@cache
def engine_of(world: World) -> Float64:
    """Return the engine's log-probs by state, shape [PROMPTS · PHASES · VOCABULARY, VOCABULARY]."""
    policy = TinyPolicy.of(SEED + world.seed, 8, Traits(stopping=(world.stopping, 0.5)))
    return normalised(policy.log_probs * world.sharpness).reshape(-1, VOCABULARY)


@cache
def trainer_of(world: World) -> Float64:
    """Return the trainer's log-probs by state."""
    engine = engine_of(world)
    random = np.random.default_rng([SEED, world.seed, 1])
    return normalised(engine + world.noise * random.normal(size=engine.shape))


@lru_cache(maxsize=4)
def shaped(world: World, sampling: SamplingParameters) -> Float64:
    """Return the engine's log-probs by state after the sampling parameters are applied."""
    return engine_of(world) if sampling == PLAIN else sampling.apply(engine_of(world))


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Rollouts of one world and one sampling: flat tokens [T] with their states, cut by `offsets`; prompts [N]."""

    world: World
    sampling: SamplingParameters
    prompts: Int64
    offsets: Int64
    tokens: Int64
    states: Int64

    def of_sampled(self, log_probs: Float64) -> NDArray[np.float32]:
        """Return the log-probs of the sampled tokens, shape [T]."""
        return np.asarray(log_probs[self.states, self.tokens], np.float32)

    def entropy(self, log_probs: Float64) -> NDArray[np.float32]:
        """Return the entropy of these log-probs at the state of each token, shape [T], in nats."""
        of_states = -(np.exp(log_probs) * np.where(np.isfinite(log_probs), log_probs, 0.0)).sum(axis=-1)
        return np.asarray(of_states[self.states], np.float32)


def draw(world: World, sampling: SamplingParameters, shape: Shape, batches: int, seed: int = 0) -> Drawn:
    """Sample `batches · shape.rollouts` rollouts; those of a prompt are consecutive."""
    random = np.random.default_rng([SEED, world.seed, seed])
    cumulative = np.cumsum(np.exp(shaped(world, sampling)), axis=-1)
    cumulative[cumulative > 1.0 - 1e-9] = 2.0
    per_group = shape.rollouts // shape.groups
    of_batches = [random.permutation(PROMPTS)[: shape.groups] for _ in range(batches)]
    prompts = np.repeat(np.concatenate(of_batches), per_group)
    running, before = np.arange(prompts.size), np.full(prompts.size, STOP)
    rows, states, tokens = [], [], []
    for step in range(shape.limit):
        here = (prompts[running] * PHASES + step % PHASES) * VOCABULARY + before
        chosen = (random.random((running.size, 1)) >= cumulative[here]).sum(axis=1)
        rows.append(running)
        states.append(here)
        tokens.append(chosen)
        onward = chosen != STOP
        running, before = running[onward], chosen[onward]
        if running.size == 0:
            break
    row = np.concatenate(rows)
    order = np.argsort(row, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=prompts.size))])
    return Drawn(world, sampling, prompts, offsets, np.concatenate(tokens)[order], np.concatenate(states)[order])


@dataclass(frozen=True, slots=True)
class Logged:
    """The kind of logging: μ before or after (`processed`) the sampling parameters, π with those of the trainer."""

    processed: bool = False
    trainer_sampling: SamplingParameters = PLAIN
    entropies: bool = True
    attributes: BatchAttributes = field(default_factory=BatchAttributes)


def batches_of(drawn: Drawn, shape: Shape, logged: Logged) -> list[RolloutBatch]:
    """Return the rollouts as batches of `shape.rollouts`."""
    engine, trainer = engine_of(drawn.world), trainer_of(drawn.world)
    whole = RolloutBatch.from_arrays(
        [f"rollout-{row}" for row in range(drawn.prompts.size)],
        np.stack([drawn.prompts, drawn.prompts + 7, drawn.prompts * 3], axis=1).ravel(),
        np.arange(drawn.prompts.size + 1) * 3,
        drawn.tokens,
        drawn.offsets,
        rollout_log_probs=drawn.of_sampled(shaped(drawn.world, drawn.sampling) if logged.processed else engine),
        trainer_log_probs=drawn.of_sampled(
            trainer if logged.trainer_sampling == PLAIN else logged.trainer_sampling.apply(trainer)
        ),
        entropy=drawn.entropy(engine) if logged.entropies else None,
        group_ids=[f"prompt-{prompt}" for prompt in drawn.prompts.tolist()],
        attributes=logged.attributes,
        check_values=False,
    )
    rows = np.arange(drawn.prompts.size).reshape(-1, shape.rollouts)
    return [whole.select(of_batch) for of_batch in rows]
