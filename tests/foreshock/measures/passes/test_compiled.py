"""Running the compiled pass: column types, numba's cache, processes without numba, and verl's metrics."""

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measures import verl_metrics
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes import compiled
from foreshock.measures.passes.compiled import prepare, sum_rollouts_compiled
from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy
from foreshock.measures.statistics.rollout_sums import RolloutSums
from tests.foreshock.measures.passes.test_equal_passes import assert_equal, batch

ALL_COLUMNS = frozenset({"generated", "entropy", "turn", "lag", "token_ids"})


@pytest.fixture(scope="module", autouse=True)
def machine_code() -> None:
    prepare()


def as_bytes(sums: RolloutSums) -> bytes:
    """Return everything that a comparison keeps of the sums."""
    return ComparisonStatistics.from_rollout_sums(sums, None).to_bytes()


def test_many_chunks_equal_the_reference() -> None:
    lengths = np.random.default_rng(1).integers(0, 3000, 300).tolist()
    inputs = batch(1, lengths, 0.3, np.float32, 0.001, ALL_COLUMNS, "tokens")
    assert_equal(sum_rollouts_compiled(inputs), sum_rollouts_numpy(inputs), inputs)


def test_sums_of_a_rollout_do_not_depend_on_the_others() -> None:
    inputs = batch(2, [600, 40, 1500], 0.3, np.float32, 0.02, ALL_COLUMNS, "tokens")
    alone = {
        field.name: getattr(inputs, field.name)[640:] for field in dataclasses.fields(inputs) if field.name != "offsets"
    }
    last = sum_rollouts_compiled(TokenInputs(offsets=np.array([0, 1500]), **alone))
    np.testing.assert_array_equal(sum_rollouts_compiled(inputs).sums[2], last.sums[0])


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
    assert compiled._table_of_ids(ids)[0].size <= 1000 * compiled._ROWS_PER_TOKEN
    np.testing.assert_array_equal(sum_rollouts_compiled(inputs).token_ids.ids, np.unique(ids))


def in_another_process(code: str, **environment: str) -> str:
    root = str(Path(compiled.__file__).parents[3])
    answer = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root} | environment, capture_output=True,
        text=True, check=True, cwd="/",
    )  # fmt: skip
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
    asked = []

    def compile_without_cache(*, cached: bool) -> str:
        asked.append(cached)
        if cached:
            raise error
        return "machine code"

    monkeypatch.setattr(compiled, "_compile", compile_without_cache)
    monkeypatch.setattr(compiled, "_made", None)
    prepare()
    assert compiled.is_prepared()
    assert asked == [True, False]


@pytest.mark.parametrize("size", [1e-6, 1e-2, 3.0])
@pytest.mark.parametrize("columns", [frozenset[str](), frozenset({"generated"})])
def test_verl_metrics_equal_those_of_the_statistics(size: float, columns: frozenset[str]) -> None:
    inputs = batch(7, [0, 3, 5, 8, 700, 40, 513], size, np.float32, 0.02, columns, "none")
    expected = ComparisonStatistics.from_rollout_sums(sum_rollouts_numpy(inputs), None).measures()
    found = verl_metrics(inputs)
    assert len(found) == 13
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-15, nan_ok=True), name
