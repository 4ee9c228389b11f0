"""The figures of tokens show what the measurements and the rollouts hold, and are drawn within the pages' policy."""

from __future__ import annotations

import json
import math

import httpx

from foreshock_service.present.pages.figures import Figure, Missing
from foreshock_service.present.pages.figures.attribution import token_figure
from tests.service.sending import make_batch, start_run


def drawn(figure: Figure | Missing) -> Figure:
    assert isinstance(figure, Figure), figure
    json.dumps(figure.to_json(), allow_nan=False)
    return figure


class TestSingleTokens:
    def test_sign_of_d_chooses_the_series_and_zeros_are_counted(self) -> None:
        log_behaviour = [math.log(0.5), math.log(1e-3), math.log(0.25), 0.0]
        figure = drawn(token_figure("trainer/rollout", 7, log_behaviour, [-0.1, 0.3, 0.0, 0.0], "All."))
        lower, higher = figure.traces
        assert (lower["name"], lower["x"], lower["y"]) == ("π < μ", [0.5], [0.1])
        assert (higher["name"], higher["x"], higher["y"]) == ("π > μ", [0.001], [0.3])
        assert "2 tokens with d = 0 are not drawn." in figure.caption
        assert "largest is 0.3, at probability 0.001; 1 have π < μ." in figure.summary
        assert figure.columns["d, nats"] == [-0.1, 0.3, 0.0, 0.0]

    def test_equal_scores_are_said_to_be_equal(self) -> None:
        figure = token_figure("trainer/rollout", 7, [-1.0, -2.0], [0.0, 0.0], "All 2 tokens.")
        assert isinstance(figure, Missing)
        assert figure.why == "The two scores are equal at all 2 sampled tokens. All 2 tokens."


def test_run_without_two_scores_has_texts(http: httpx.Client) -> None:
    sender = start_run(http, "half")
    sender.put_shard(1, make_batch(trainer_log_probs=None)).raise_for_status()
    address = f"/pages/runs/{sender.run}"
    buckets = http.get(f"{address}/figures/buckets.json").raise_for_status().json()
    assert buckets["missing"] == "No closed step has log-probs of two scorers yet."
    tokens = http.get(f"{address}/steps/1/figures/tokens.json").raise_for_status().json()
    assert tokens["missing"] == "step 1 of attempt 1 has no trainer/rollout."
