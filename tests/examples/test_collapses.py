"""The benchmark of collapses without an engine: grid, split, a baseline of an alarm, result files, the document."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from examples.collapses.__main__ import missing_runs
from examples.collapses.analyse import DOCUMENT, document
from examples.collapses.grid import DOSES, LEARNING_RATES, SEEDS, Dose, RunSettings, grid
from examples.collapses.results import (
    RESULTS,
    Result,
    UnreadableResult,
    columns_of,
    pack_results,
    read_result,
    read_results,
    result_file,
    write_result,
)
from examples.collapses.run import START
from examples.collapses.sampling import ExactSource, round_to_bits, sampler_weights
from examples.tiny_rl.model import load_model
from examples.tiny_rl.policy import next_token_distributions, pad
from examples.tiny_rl.task import encode
from tests.paths import REPOSITORY

COLLAPSING = [0.5] * 30 + [0.1] * 30


def result(name: str, rewards: list[float], **columns: list[float]) -> tuple[str, Result]:
    """Return a result as the runner writes it, with these rewards."""
    (settings,) = (each for each in grid() if each.name == name)
    rows = [
        {
            "rollout:reward_mean": reward,
            "trainer/rollout:k3_kl": 1e-3,
            "fixed:float32_k3_kl": 1e-3,
            **{key: values[step] for key, values in columns.items()},
        }
        for step, reward in enumerate(rewards)
    ]
    made_by = {
        "engine": {"engine_version": "1", "device_name": "a CPU", "cpu_isa": "AVX2"},
        "trainer": {"engine_version": "2"},
    }
    steps = np.arange(1, len(rewards) + 1, dtype=np.int32)
    return name, Result(settings.to_json(), "all steps", 1.0, 2.0, made_by, steps, columns_of(rows))


def test_grid_has_every_cell_once_and_at_least_120_runs() -> None:
    cells = Counter((run.dose.name, run.learning_rate, run.seed) for run in grid())
    assert set(cells.values()) == {1}
    assert len(cells) == len(DOSES) * len(LEARNING_RATES) * SEEDS >= 120
    assert len({run.name for run in grid()}) == len(cells)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_rounding_keeps_few_values_a_row_within_half_a_spacing(bits: int) -> None:
    matrix = torch.randn(8, 400, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0.0
    rounded = round_to_bits(matrix, bits)
    spacing = matrix.abs().amax(dim=1) / (2 ** (bits - 1) - 1)
    assert all(len(row.unique()) <= 2**bits - 1 for row in rounded)
    assert bool(((rounded - matrix).abs().amax(dim=1) <= spacing * 0.5001).all())
    assert torch.equal(round_to_bits(rounded, bits), rounded) or bits > 4
    assert not rounded[3].any()


def test_partial_sync_keeps_the_named_tensor_and_rounding_spares_vectors() -> None:
    start = {"lm_head.weight": torch.zeros(2, 2), "norm.weight": torch.zeros(3)}
    now = {"lm_head.weight": torch.ones(2, 2), "norm.weight": torch.tensor([0.1, 0.2, 1.0])}
    (partial,) = (dose for dose in DOSES if dose.unsynced)
    held = sampler_weights(partial, now, start)
    assert torch.equal(held["lm_head.weight"], start["lm_head.weight"])
    assert torch.equal(held["norm.weight"], now["norm.weight"])
    assert torch.equal(sampler_weights(Dose("", "", weight_bits=2), now, start)["norm.weight"], now["norm.weight"])


def test_trainers_pass_as_sampler_samples_its_own_distribution() -> None:
    settings = replace(RunSettings(DOSES[0], 1e-4, 0), max_response_tokens=2)
    model = load_model(START)
    prompt = encode("1+2+3=")
    torch.manual_seed(0)
    (group,) = ExactSource(model, settings).sample([prompt], 2000)
    counts = np.bincount([each.token_ids[0] for each in group], minlength=16)
    with torch.no_grad():
        distribution = next_token_distributions(model, pad([prompt], [[0]]))[0, len(prompt) - 1].exp().double().numpy()
    error = np.sqrt(distribution * (1 - distribution) * 2000)
    assert np.all(np.abs(counts - 2000 * distribution) <= 4 * error + 1)


def test_result_file_keeps_values_and_settings_and_leaves_no_part(tmp_path: Path) -> None:
    name, written = result("w4-lr0.0003-seed1", COLLAPSING)
    write_result(result_file(tmp_path, name), written)
    found = read_result(result_file(tmp_path, name))
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.parquet"]
    assert (found.dose, found.learning_rate, found.seed) == ("w4", 3e-4, 1)
    np.testing.assert_array_equal(found.columns["rollout:reward_mean"], np.array(COLLAPSING, np.float32))


def test_other_parquet_files_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"step": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UnreadableResult, match="no result of this benchmark"):
        read_result(tmp_path / "other.parquet")


def test_a_run_is_missing_until_its_file_has_its_final_name(tmp_path: Path) -> None:
    first, second = grid()[:2]
    (tmp_path / f"{first.name}.part").write_bytes(b"half")
    assert missing_runs(grid(), tmp_path)[0] == first
    (tmp_path / f"{first.name}.parquet").write_bytes(b"")
    assert missing_runs(grid(), tmp_path)[0] == second


def test_a_new_run_is_added_to_the_packed_ones(tmp_path: Path) -> None:
    for name in ("lag8-lr0.0003-seed2", "none-lr0.0004-seed1"):
        write_result(result_file(tmp_path, name), read_results(RESULTS, only=name)[name])
        pack_results(tmp_path)
    assert list(read_results(tmp_path)) == ["lag8-lr0.0003-seed2", "none-lr0.0004-seed1"]


def test_document_is_the_one_of_the_committed_results() -> None:
    results = read_results(RESULTS)
    planned = {run.name for run in grid()}
    assert set(results) <= planned
    # To write it: python -m examples.collapses.analyse
    assert DOCUMENT.read_text() == document(results)


def test_committed_results_are_small_and_their_settings_are_those_of_the_grid() -> None:
    expected = {run.name: run.to_json() | {"part": run.part} for run in grid()}
    for name, found in read_results(RESULTS).items():
        wanted = expected[name]
        assert {**found.settings, "dose": None} == {**wanted, "dose": None}
        assert found.settings["dose"]["name"] == wanted["dose"]["name"]
        assert found.dose != "none" or not found.columns["trainer/rollout:max_abs_d"].any()
    assert sum(path.stat().st_size for path in RESULTS.glob("*.parquet")) < 20e6


PRODUCTS = """
import torch
from examples.collapses.bfloat16 import round_once

emulated = round_once()
assert round_once() is emulated
draws = torch.Generator().manual_seed(0)
left, right, added = (torch.randn(shape, generator=draws).bfloat16() for shape in ((40, 64), (64, 48), (48,)))
exact = left.double() @ right.double()
batches = torch.stack([left, -left]), torch.stack([right, right])


def check(found, exact):
    assert found.dtype is torch.bfloat16
    # Half of the spacing of bfloat16, and what a sum in float32 may add.
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


check(torch.mm(left, right), exact)
check(torch.bmm(*batches), batches[0].double() @ batches[1].double())
check(torch.addmm(added, left, right, beta=2, alpha=0.5), 2 * added.double() + 0.5 * exact)
leaf = left.clone().requires_grad_()
with torch.autocast("cpu", torch.bfloat16):
    product = torch.nn.functional.linear(leaf, right.T)
check(product.detach(), exact)
product.sum().backward()
check(leaf.grad, torch.ones_like(exact) @ right.double().T)
assert torch.equal(torch.mm(left.float(), right.float()).double().round(decimals=3), exact.round(decimals=3))
if emulated:
    assert torch.equal(torch.mm(left, right), torch.mm(left.float(), right.float()).bfloat16())
"""


def test_products_and_gradients_are_rounded_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRODUCTS], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
