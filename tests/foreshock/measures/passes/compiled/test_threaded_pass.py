"""Running the compiled pass: threads, column types, numba's cache, and processes without numba."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes import compiled
from foreshock.measures.passes.compiled import prepare, sum_rollouts_compiled
from foreshock.measures.passes.compiled.input_columns import batch_columns
from foreshock.measures.passes.compiled.threaded_pass import lane_cuts
from foreshock.measures.statistics.rollout_sums import RolloutSums
from tests.foreshock.measures.passes.compiled.test_equal_to_numpy import assert_equal, batch

ALL_COLUMNS = frozenset({"generated", "entropy", "turn", "lag", "token_ids"})


@pytest.fixture(scope="module", autouse=True)
def machine_code() -> None:
    prepare()


def as_bytes(sums: RolloutSums) -> bytes:
    """Return everything that a comparison keeps of the sums."""
    return ComparisonStatistics.from_rollout_sums(sums, None).to_bytes()


def large_batch() -> TokenInputs:
    """Return enough tokens for several lanes."""
    lengths = np.random.default_rng(1).integers(0, 3000, 300).tolist()
    return batch(1, lengths, 0.3, np.float32, 0.001, ALL_COLUMNS, "tokens")


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    inputs = large_batch()
    assert lane_cuts(inputs.offsets, 0).size > 3
    one = sum_rollouts_compiled(inputs, threads=1)
    for threads in (2, 3, 7):
        several = sum_rollouts_compiled(inputs, threads=threads)
        assert as_bytes(several) == as_bytes(one)
        for field in ("sums", "weight_sums", "largest_d", "largest_minus_d"):
            np.testing.assert_array_equal(getattr(several, field), getattr(one, field))
        np.testing.assert_array_equal(several.token_ids.sums.value, one.token_ids.sums.value)


def test_several_lanes_equal_the_reference() -> None:
    from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy

    inputs = large_batch()
    assert_equal(sum_rollouts_compiled(inputs), sum_rollouts_numpy(inputs), inputs)


def test_lanes_hold_all_rollouts_and_depend_on_the_batch_alone() -> None:
    offsets = np.concatenate([[0], np.cumsum(np.full(100, 20_000))])
    cuts = lane_cuts(offsets, 0)
    assert cuts[0] == 0
    assert cuts[-1] == 100
    assert (np.diff(cuts) > 0).all()
    # Tables of token ids are no larger than the batch's log-probs and ids.
    assert (lane_cuts(offsets, 700_000).size - 1) * 700_000 * 32 <= 12 * offsets[-1]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.longdouble])
def test_columns_of_other_types_are_converted(dtype: type[np.floating]) -> None:
    inputs = batch(3, [30, 600], 0.3, np.float32, 0.02, ALL_COLUMNS, "tokens")
    with np.errstate(over="ignore"):
        target, behaviour = inputs.target.astype(np.float16), inputs.behaviour.astype(np.float16)
    same = TokenInputs(target.astype(np.float32), behaviour.astype(np.float32), inputs.offsets)
    other = TokenInputs(target.astype(dtype), behaviour.astype(dtype), inputs.offsets)
    assert as_bytes(sum_rollouts_compiled(other)) == as_bytes(sum_rollouts_compiled(same))


def test_columns_may_be_strided_and_read_only() -> None:
    inputs = batch(4, [30, 600], 0.3, np.float32, 0.02, ALL_COLUMNS, "tokens")
    expected = as_bytes(sum_rollouts_compiled(inputs))
    strided = dataclasses.replace(
        inputs,
        target=np.repeat(inputs.target, 2)[::2],
        turn=np.repeat(inputs.turn, 3)[::3],  # type: ignore[arg-type]
    )
    assert as_bytes(sum_rollouts_compiled(strided)) == expected
    inputs.target.flags.writeable = False
    inputs.offsets.flags.writeable = False
    assert as_bytes(sum_rollouts_compiled(inputs)) == expected


@pytest.mark.parametrize("largest", [50, 5_000, 10**9])
def test_table_of_token_ids_is_bounded_for_any_ids(largest: int) -> None:
    inputs = batch(5, [400, 600], 0.3, np.float32, 0.0, frozenset(), "none")
    ids = np.random.default_rng(0).integers(0, largest, 1000)
    ids[0] = largest
    inputs = dataclasses.replace(inputs, token_ids=ids)
    assert batch_columns(inputs).table_size <= 1000
    np.testing.assert_array_equal(sum_rollouts_compiled(inputs).token_ids.ids, np.unique(ids))


def test_inputs_are_unchanged() -> None:
    inputs = batch(6, [30, 600], 0.3, np.float32, 0.5, ALL_COLUMNS, "tokens")
    before = dataclasses.replace(inputs, target=inputs.target.copy(), behaviour=inputs.behaviour.copy())
    sum_rollouts_compiled(inputs)
    np.testing.assert_array_equal(inputs.target, before.target)
    np.testing.assert_array_equal(inputs.behaviour, before.behaviour)
    assert inputs.target.flags.writeable


def in_another_process(code: str, **environment: str) -> str:
    root = str(Path(compiled.__file__).parents[3])
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return answer.stdout.strip()


def test_only_prepare_imports_numba() -> None:
    code = "import sys, foreshock.measures.comparison as c; from foreshock.measures.passes import compiled; print("
    assert in_another_process(f"{code}'numba' in sys.modules, compiled.is_prepared(), compiled.available())") == (
        "False False True"
    )


def test_pass_is_available_only_with_numba() -> None:
    code = "import sys; sys.modules['numba'] = None\nfrom foreshock.measures.passes import compiled\n"
    assert in_another_process(f"{code}print(compiled.available(), compiled.is_prepared())") == "False False"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cannot cache function: no locator available"),
        OSError(28, "No space left on device"),
        EOFError("Ran out of input"),  # raised for a cached file that is empty or truncated
        pickle.UnpicklingError("pickle data was truncated"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_unusable_cache_falls_back_to_compiling(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from foreshock.measures.passes.compiled import compilation

    asked = []

    def compile_without_cache(*, cached: bool) -> str:
        asked.append(cached)
        if cached:
            raise error
        return "machine code"

    monkeypatch.setattr(compilation, "_compile", compile_without_cache)
    compilation._functions.cache_clear()
    try:
        compiled: object = compilation.compiled_functions()
        assert compiled == "machine code"
    finally:
        compilation._functions.cache_clear()
    assert asked == [True, False]
