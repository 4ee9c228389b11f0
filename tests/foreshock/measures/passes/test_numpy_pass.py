"""The numpy pass: unchanged inputs, little memory, independence of chunks."""

import dataclasses
import tracemalloc

import numpy as np

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy
from foreshock.rollouts.arrays import offsets_of_lengths
from tests.foreshock.batches import random_log_probs


def inputs_of(lengths: list[int], seed: int = 0) -> TokenInputs:
    """Return every column, in the types of a batch."""
    generator = np.random.default_rng(seed)
    offsets = offsets_of_lengths(lengths)
    tokens = int(offsets[-1])
    target, behaviour = random_log_probs(generator, tokens, 1e-6, 3.0)
    return TokenInputs(
        target,
        behaviour,
        offsets,
        generated=generator.random(tokens) > 0.1,
        entropy=generator.exponential(1.0, tokens).astype(np.float32),
        turn=(np.arange(tokens) // 300).astype(np.int16),
        lag=np.repeat(generator.integers(0, 3, len(lengths)), lengths),
        token_ids=generator.integers(0, 150_000, tokens).astype(np.int32),
        advantage=generator.normal(size=tokens).astype(np.float32),
    )


def columns(inputs: TokenInputs) -> list[np.ndarray]:
    values = [getattr(inputs, field.name) for field in dataclasses.fields(inputs)]
    return [value for value in values if value is not None]


def test_input_is_unchanged() -> None:
    inputs = inputs_of([100, 0, 50_000, 7])
    before = [column.copy() for column in columns(inputs)]
    for column in columns(inputs):
        column.setflags(write=False)
    sum_rollouts_numpy(inputs)
    for column, copy in zip(columns(inputs), before, strict=True):
        np.testing.assert_array_equal(column, copy)


def test_memory_is_at_most_twice_the_input() -> None:
    inputs = inputs_of([3000] * 400)
    tracemalloc.start()
    try:
        sum_rollouts_numpy(inputs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * sum(column.nbytes for column in columns(inputs))
