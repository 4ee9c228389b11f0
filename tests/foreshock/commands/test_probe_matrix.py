"""The text of a matrix: a row for each cell, why a cell has no result, the recommendations."""

from __future__ import annotations

from typing import Any

import pytest

from foreshock.commands.main import main
from foreshock.commands.probe_matrix import matrix_lines


def cell(probe: str, scorer: str, state: str = "done", **fields: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "changed": {},
        "hardware": "cpu",
        "reason": None,
        "against_reference": None,
        "seconds_per_token": None,
    }
    return {"probe": probe, "scorer": scorer, "state": state, **plain, **fields}


def test_rows_show_mismatch_cost_and_reason() -> None:
    found = {"k3_kl": 8.04e-4, "low": 6.1e-4, "high": 1e-3}
    lines = matrix_lines(
        {
            "step": 3, "rollouts": 64, "tokens": 4096, "reference": "a", "other_cells": 2,
            "cells": [
                cell("a", "torch.float32", seconds_per_token=2e-5),
                cell("b", "torch.trainer", changed={"autocast": None, "batch_size": 8}, against_reference=found),
                cell("c", "vllm.prefill", "failed", reason="no FP8 KV cache on a CPU"),
            ],
            "recommendations": ["cpu: keep it."],
        }
    )  # fmt: skip
    text = "\n".join(lines)
    assert "step 3: 64 rollouts, 4096 tokens" in lines[0]
    reference, changed, failed = (
        next(line for line in lines if name in line) for name in ("float32", "trainer", "vllm")
    )
    assert reference.split() == ["cpu", "torch.float32", "as", "it", "is", "reference", "20"]
    assert "autocast=null, batch_size=8" in changed
    assert changed.split()[-4:] == ["0.000804", "0.00061", "to", "0.001"]
    assert failed.endswith("failed: no FP8 KV cache on a CPU")
    assert "2 older cells" in text
    assert "→ cpu: keep it." in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["matrix", "a-run"], "needs --step"),
        (["matrix", "a-run", "--step", "1", "--vary", "head_dtype=float32"], "SCORER:OPTION=VALUE"),
        (["a-run", "soon"], "STEP must be a whole number, got soon"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *words, "--url", "http://127.0.0.1:1"]) == 1
    assert expected in capsys.readouterr().err
