"""The recommendation of a matrix: the lowest mismatch beyond the interval, at the least time, with its price."""

from __future__ import annotations

from typing import Any

from foreshock.diagnosis.configurations import MeasuredSetting, Setting, recommend

NAME = "torch.trainer/vllm.prefill"


def measured(
    k3: float,
    engine: dict[str, Any],
    trainer: dict[str, Any],
    seconds: tuple[float | None, float | None] = (1e-5, 2e-5),
) -> MeasuredSetting:
    settings = (Setting("vllm.prefill", engine, seconds[0]), Setting("torch.trainer", trainer, seconds[1]))
    return MeasuredSetting(NAME, settings, k3, 0.8 * k3, 1.2 * k3)


HEAD = {"head_dtype": "float32"}
BASELINE = measured(8e-4, {}, {})


def test_recommendation_names_the_change_the_factor_and_the_price_of_each_side() -> None:
    found = recommend([BASELINE, measured(1e-4, HEAD, HEAD, (1.03e-5, 2.2e-5)), measured(7e-4, HEAD, {})])
    assert found == (
        "With head_dtype=float32 in vllm.prefill and head_dtype=float32 in torch.trainer, k3 of "
        "torch.trainer/vllm.prefill is 0.0001 instead of 0.0008 (÷ 8); vllm.prefill takes +3% time per token, "
        "torch.trainer takes +10% time per token."
    )


def test_of_nearly_equal_ones_the_cheaper_is_recommended() -> None:
    dear = measured(1e-4, {"dtype": "float32"}, {}, (4e-5, 2e-5))
    cheap = measured(1.2e-4, {"dtype": "float16"}, {}, (1e-5, 2e-5))
    found = recommend([BASELINE, dear, cheap])
    assert found is not None
    assert "dtype=float16" in found


def test_change_within_the_interval_is_not_recommended() -> None:
    found = recommend([BASELINE, measured(7e-4, HEAD, HEAD)])
    assert found is not None
    assert "keep it" in found


def test_unknown_time_is_said() -> None:
    found = recommend([BASELINE, measured(0.0, HEAD, {}, (None, 2e-5))])
    assert found is not None
    assert "is unknown" in found
    assert "÷" not in found


def test_without_baseline_or_alternative_there_is_none() -> None:
    assert recommend([BASELINE]) is None
    assert recommend([measured(1e-4, HEAD, {}), measured(1e-4, HEAD, HEAD)]) is None
