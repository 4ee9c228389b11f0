"""Healthy rollouts of many kinds, for which the lint must give no critical warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.lint_rollouts import (
    PLAIN,
    Logged,
    SamplingParameters,
    Shape,
    World,
    batches_of,
    draw,
    engine_of,
    normalised,
)
from foreshock.rollouts import BatchAttributes, RolloutBatch

Float64 = NDArray[np.float64]
Trainer = Callable[[Float64], Float64]


@dataclass(frozen=True, slots=True)
class Healthy:
    """A kind of healthy batch: `trainer` computes π from μ by state, `change` edits the batch."""

    name: str
    world: World
    shape: Shape
    trainer: Trainer | None = None
    sampling: SamplingParameters = PLAIN
    change: Callable[[RolloutBatch], RolloutBatch] | None = None
    share: float = 1.0
    trainer_entropy: bool = False


def noise(size: float, outliers: float = 0.0, outlier_noise: float = 1.0) -> Trainer:
    """Return a trainer with noise on its logits; more noise at a share of the states (other experts chosen)."""

    def trainer(engine: Float64) -> Float64:
        random = np.random.default_rng(7)
        sizes = np.where(random.random((engine.shape[0], 1)) < outliers, outlier_noise, size)
        return normalised(engine + sizes * random.normal(size=engine.shape))

    return trainer


def drift(sharper: float, elsewhere: float) -> Trainer:
    """Return a trainer some updates later: sharper or softer by a factor, with noise."""

    def trainer(engine: Float64) -> Float64:
        return noise(elsewhere)(normalised(engine * sharper))

    return trainer


def tool_output(batch: RolloutBatch) -> RolloutBatch:
    """Make a quarter of the tokens tool output: masked, without a log μ, with a log π and an entropy."""
    assert batch.rollout_log_probs is not None
    mask = (np.random.default_rng(3).random(batch.num_tokens) > 0.25).astype(np.uint8)
    behaviour = np.where(mask == 0, np.float32(0), batch.rollout_log_probs)
    return replace(batch, response_mask=mask, rollout_log_probs=behaviour)


def versions(batch: RolloutBatch) -> RolloutBatch:
    """Give the tokens of a response different weights versions."""
    version = (np.arange(batch.num_tokens) % 3).astype(np.int32)
    return replace(batch, weights_version=version)


def float16_entropy(batch: RolloutBatch) -> RolloutBatch:
    """Round entropies to float16."""
    assert batch.entropy is not None
    return replace(batch, entropy=batch.entropy.astype(np.float16).astype(np.float32))


def no_entropy(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, entropy=None)


def no_groups(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, group_ids=None)


ANSWERS, REASONING = World(1.0, -2.0), World(2.0, -1.7, seed=1)
LONG, SHARP, FLAT = World(3.0, -4.0, seed=2), World(8.0, -1.0, seed=3), World(0.3, -8.0, seed=4)
ORDINARY, FEW, TINY, ONE_PROMPT = Shape(128, 16, 400), Shape(32, 4, 400), Shape(8, 2, 400), Shape(32, 1, 400)
WIDE = Shape(128, 128, 400)
LONG_ONE = Shape(32, 8, 2000)

KINDS: tuple[Healthy, ...] = (
    *(
        Healthy(f"dense, k3 {k3}, {world_name}, {shape_name}", world, shape, noise(size))
        for k3, size in (("1e-5", 0.006), ("1e-3", 0.06))
        for world_name, world in (("answers", ANSWERS), ("reasoning", REASONING), ("sharp", SHARP), ("flat", FLAT))
        for shape_name, shape in (("128 of 16", ORDINARY), ("32 of 4", FEW), ("8 of 2", TINY), ("32 of 1", ONE_PROMPT))
    ),
    *(
        Healthy(f"experts, {name}, {world_name}, {shape_name}", world, shape, trainer)
        for name, trainer in (("even", noise(0.3)), ("some states", noise(0.03, 0.03, 2.0)))
        for world_name, world in (("answers", ANSWERS), ("reasoning", REASONING), ("sharp", SHARP))
        for shape_name, shape in (("128 of 16", ORDINARY), ("128 of 128", WIDE), ("8 of 2", TINY))
    ),
    *(
        Healthy(
            f"lag, {name}, entropy of {'π' if of_trainer else 'μ'}, {world_name}",
            world,
            ORDINARY,
            trainer,
            change=versions,
            trainer_entropy=of_trainer,
        )
        for name, trainer in (
            ("sharper", drift(1.15, 0.1)),
            ("softer", drift(0.85, 0.1)),
            ("much softer", drift(0.7, 0.3)),
            ("much sharper", drift(1.4, 0.3)),
        )
        for world_name, world in (("answers", ANSWERS), ("reasoning", REASONING), ("sharp", SHARP), ("long", LONG))
        for of_trainer in (False, True)
    ),
    *(
        Healthy(f"long, {name}", LONG, LONG_ONE, trainer, share=0.5)
        for name, trainer in (("dense", noise(0.03)), ("experts", noise(0.3)))
    ),
    *(
        Healthy(f"{name}, {world_name}", world, ORDINARY, noise(0.03), PLAIN, change)
        for name, change in (
            ("tool output", tool_output),
            ("float16 entropy", float16_entropy),
            ("no entropy", no_entropy),
            ("no groups", no_groups),
        )
        for world_name, world in (("answers", ANSWERS), ("reasoning", REASONING), ("sharp", SHARP))
    ),
    *(
        Healthy(f"declared and applied, {name}, {world_name}", world, ORDINARY, noise(0.01), sampling, no_entropy)
        for name, sampling in (
            ("top-p 0.95", SamplingParameters(top_p=0.95)),
            ("temperature 0.6", SamplingParameters(temperature=0.6)),
            ("top-k 5", SamplingParameters(top_k=5)),
        )
        for world_name, world in (("answers", ANSWERS), ("reasoning", REASONING))
    ),
)


def healthy_batches(kind: Healthy, count: int) -> Iterator[RolloutBatch]:
    """Yield `count` batches of a kind."""
    engine = engine_of(kind.world)
    drawn = draw(kind.world, kind.sampling, kind.shape, count, seed=11)
    plain = kind.sampling == PLAIN
    attributes = BatchAttributes() if plain else kind.sampling.attributes("processed_logprobs")
    target = engine if kind.trainer is None else kind.trainer(engine)
    taken = drawn.of_sampled(kind.sampling.apply(target))
    logged = Logged(processed=not plain, entropies=True, attributes=attributes)
    entropy = drawn.entropy(target) if kind.trainer_entropy else None
    at = 0
    for batch in batches_of(drawn, kind.shape, logged):
        here = slice(at, at + batch.num_tokens)
        at += batch.num_tokens
        batch = replace(batch, trainer_log_probs=taken[here])
        if entropy is not None:
            batch = replace(batch, entropy=entropy[here])
        yield batch if kind.change is None else kind.change(batch)
