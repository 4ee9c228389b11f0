"""Cells of a matrix: the reference and each scorer's defaults come first, bounds and wrong names are refused."""

from __future__ import annotations

import pytest

from foreshock.configuration_grid import (
    MOST_CELLS,
    Cell,
    cells_of_grid,
    default_cells,
    parse_variation,
    product_of,
)
from foreshock.errors import ConfigurationError
from foreshock.scorers import REFERENCE


def test_product_has_every_combination_of_a_scorers_options() -> None:
    varied = [
        parse_variation("torch.trainer:head_dtype=null,float32"),
        parse_variation("torch.trainer:batch_size=8,16"),
        parse_variation("vllm.prefill:enforce_eager=false"),
    ]
    assert cells_of_grid(product_of(varied)) == [
        Cell(REFERENCE),
        Cell("torch.trainer"),
        Cell("torch.trainer", {"head_dtype": None, "batch_size": 8}),
        Cell("torch.trainer", {"head_dtype": None, "batch_size": 16}),
        Cell("torch.trainer", {"head_dtype": "float32", "batch_size": 8}),
        Cell("torch.trainer", {"head_dtype": "float32", "batch_size": 16}),
        Cell("vllm.prefill"),
        Cell("vllm.prefill", {"enforce_eager": False}),
    ]


def test_default_grid_changes_one_thing_at_a_time_and_fits() -> None:
    cells = default_cells()
    assert cells[0] == Cell(REFERENCE)
    assert {cell.scorer for cell in cells} == {REFERENCE, "vllm.prefill", "torch.trainer"}
    assert len(cells) <= MOST_CELLS
    assert [cell.scorer for cell in default_cells(["torch.trainer"])][:2] == [REFERENCE, "torch.trainer"]


def test_default_options_exist() -> None:
    torch_forward = pytest.importorskip("foreshock_probes.scorers.torch_forward")
    vllm_arguments = pytest.importorskip("foreshock_probes.scorers.vllm_engine")
    options = {"torch.trainer": torch_forward.TrainerOptions, "vllm.prefill": vllm_arguments.VllmOptions}
    for cell in default_cells()[1:]:
        options[cell.scorer](**cell.options)


@pytest.mark.parametrize("text", ["head_dtype=float32", "torch.trainer:head_dtype", "torch.trainer:=1", "x"])
def test_variation_without_its_parts_raises(text: str) -> None:
    with pytest.raises(ConfigurationError, match="SCORER:OPTION=VALUE"):
        parse_variation(text)


def test_too_many_cells_and_logged_scorers_raise() -> None:
    with pytest.raises(ConfigurationError, match="at most 32 cells"):
        cells_of_grid([("torch.trainer", {"batch_size": size}) for size in range(1, 40)])
    with pytest.raises(ConfigurationError, match="'rollout'"):
        cells_of_grid([("rollout", {})])
