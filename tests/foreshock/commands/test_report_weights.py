"""The table of a weights search: nearest replays first, the announced weights always shown, skipped ones counted."""

from __future__ import annotations

import io
import math

from foreshock.api.replays import WeightsReplayRecord, WeightsSearchRecord
from foreshock.commands.report_attribution import MOST_ROWS, weights_search_lines
from foreshock.commands.text import Paint

PLAIN = Paint(io.StringIO())


def replay(weights: str, k3: float, **fields: object) -> WeightsReplayRecord:
    values = {"announced": False, "k3_low": k3 / 2, "k3_high": 2 * k3, "max_abs_d": 1.0, "at_noise_floor": False}
    return WeightsReplayRecord(step=1, part="all", weights=weights, k3_kl=k3, **(values | fields))  # type: ignore[arg-type]


def test_nearest_replays_come_first_and_the_announced_weights_are_always_there() -> None:
    replays = [replay("the weights of step 60", 0.018, announced=True)]
    replays += [replay(f"the weights of step {step}", 0.001 * step) for step in range(1, 12)]
    replays.append(replay("the lm_head of step 1", 4e-14, at_noise_floor=True))
    gone = replay("the weights of step 30", math.nan, skipped="gone")
    search = WeightsSearchRecord(
        run="run_1", attempt=1, step=60, scorer="vllm.prefill", rollouts=24, tokens=480, floor_k3=1e-8, bound=1e-6,
        tied=False, replays=(*replays, gone), confirmed_k3=math.nan, ended="found",
    )  # fmt: skip
    lines = weights_search_lines(search, PLAIN)
    rows = [line.strip() for line in lines[2 : MOST_ROWS + 3]]
    assert rows[0].startswith("the lm_head of step 1")
    assert rows[0].endswith("at the noise floor")
    assert rows[1].startswith("the weights of step 1 ")
    assert rows[-1].startswith("(the announced weights alone)")
    said = " ".join(" ".join(lines).split())
    assert "4 more replays with larger k3" in said
    assert "1 skipped, such as the weights of step 30: gone" in said
    assert said.endswith("the search ended: found")
