"""The text of a comparison of routed experts: its figures are those of the measures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.commands.report_probes import routing_lines
from foreshock.measures.routing import measure_routing
from foreshock.routing import RoutingComparison

TOKENS = 400


def lines(differing: NDArray[Any], d: NDArray[np.float64]) -> str:
    """Return the text for routes that differ at the tokens `differing` in layer 7 of 3 and 7."""
    target = np.zeros((TOKENS, 2, 2), np.int16)
    target[:, :, 1] = 1
    behaviour = target.copy()
    behaviour[differing, 1, 1] = 2
    zeros = np.zeros(TOKENS)
    found = measure_routing(target, behaviour, d, zeros, np.arange(41) * 10, layers=[3, 7])
    made = {"engine": "torch"}
    comparison = RoutingComparison(
        target="torch.trainer", behaviour="vllm.prefill", target_fingerprint=made, behaviour_fingerprint=made,
        measures=found,
    )  # fmt: skip
    return "\n".join(routing_lines(comparison))


def test_text_names_the_layer_and_the_cost() -> None:
    rows = np.arange(0, TOKENS, 8)
    d = np.zeros(TOKENS)
    d[rows] = -0.2
    text = lines(rows, d)
    assert "Routed experts of torch.trainer (π) and vllm.prefill (μ), 2 per token and layer, 400 tokens" in text
    cells = [row.split() for row in text.splitlines()]
    assert ["3", "100", "%", "100", "%", "…", "100", "%", "100", "%", "0", "%"] in cells
    (seventh,) = [row for row in cells if row[:3] == ["7", "87.5", "%"]]
    assert seventh[-4:] == ["93.75", "%", "12.5", "%"]
    assert "12.5 % of the tokens" in text
    assert "most of them first in layer 7" in " ".join(text.split())
    assert "they carry 100 % of the sum of k3" in " ".join(text.split())
    (row,) = [row for row in text.splitlines() if "other experts in any layer" in row]
    assert " 50 " in row
    assert row.rstrip().endswith("0.200")


def test_text_of_equal_routes_says_so() -> None:
    text = lines(np.zeros(0, np.int64), np.full(TOKENS, -0.1))
    assert "All 400 tokens have the same experts in all layers." in text
    assert "NaN" not in text
    assert "nan" not in text
