"""The table of a comparison by layer."""

from __future__ import annotations

from typing import Any

from foreshock.commands.report_probes import layers_lines


def mean(value: float | None) -> dict[str, float | None]:
    return {"mean": value, "low": None if value is None else value / 2, "high": None if value is None else value * 2}


def layer(name: str, level: float | None, *, departs: bool = False) -> dict[str, Any]:
    distance = {"relative_l2": mean(level), "relative_l2_p99": level}
    floors = [{"relative_l2": mean(value)} for value in (1e-7, 3e-7)]
    return {"name": name, "distance": distance, "compared_floor": floors[0], "reference_floor": floors[1],
            "departs": departs}  # fmt: skip


def test_table_has_a_row_for_each_place() -> None:
    comparison = {
        "compared": "torch.trainer",
        "reference": "torch.float32",
        "states": 4321,
        "rollouts": 64,
        "non_finite": 2,
        "layers": [layer("embeddings", None), layer("layers.0", 1.5e-3, departs=True), layer("norm", 2e-3)],
        "sentence": "They depart first at layers.0.",
    }
    lines = layers_lines(comparison)
    assert lines[1] == "  Hidden states of torch.trainer against torch.float32, 4,321 states of 64 rollouts:"
    (row,) = [line.split() for line in lines if line.strip().startswith("layers.0")]
    assert row == ["layers.0", "0.00150", "7.50e-4", "…", "0.00300", "0.00150", "3.00e-7", "departs"]
    assert any("2 states left out" in line for line in lines)
    assert lines[-1] == "  → They depart first at layers.0."
    assert max(map(len, lines)) <= 100
