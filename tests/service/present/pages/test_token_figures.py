"""The figures of tokens show what the measurements and the rollouts hold, and are drawn within the pages' policy."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import numpy as np
import pytest

from foreshock.measures.statistics.conditions import BucketTable
from foreshock_service.present.pages.figures import Figure, Missing
from foreshock_service.present.pages.figures.attribution import token_figure
from foreshock_service.present.pages.figures.buckets import heat_map_figure
from foreshock_service.present.pages.presenters import rollout as presenter
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import Fleet, SentRun, Site
from tests.service.sending import make_batch, start_run

ON_HEAT_MAP = '[data-figure$="/heat-map.json"]'
ON_TOKENS = '[data-figure$="/tokens.json"]'


def drawn(figure: Figure | Missing) -> Figure:
    assert isinstance(figure, Figure), figure
    json.dumps(figure.to_json(), allow_nan=False)
    return figure


def bucket_table(tokens: list[int], mean_abs_d: list[float]) -> BucketTable:
    edges, unused = np.array([0.0, 1e-4, 1e-2, 0.1, 1.0]), np.full(4, math.nan)
    return BucketTable(edges, np.array(tokens), np.array(mean_abs_d), unused, unused, unused, unused)


class TestHeatMap:
    FIGURE = heat_map_figure(
        "trainer/rollout",
        [
            (10, bucket_table([0, 3, 5, 100], [math.nan, 0.2, 0.02, 0.001])),
            (20, bucket_table([0, 0, 7, 100], [math.nan, math.nan, 0.03, 0.0])),
            (30, bucket_table([0, 2, 0, 100], [math.nan, 0.9, math.nan, 0.001])),
        ],
        of_steps=300,
    )

    def test_each_bucket_with_tokens_is_a_cell_at_its_step(self) -> None:
        figure = drawn(self.FIGURE)
        grey, coloured = figure.traces
        assert list(zip(grey["x"], grey["base"], strict=True)) == [(20, 1.5)]
        cells = zip(coloured["x"], coloured["base"], coloured["marker"]["color"], strict=True)
        assert list(cells) == [
            (10, -0.5, pytest.approx(math.log10(0.2), abs=1e-3)),
            (10, 0.5, pytest.approx(math.log10(0.02), abs=1e-3)),
            (10, 1.5, -3),
            (20, 0.5, pytest.approx(math.log10(0.03), abs=1e-3)),
            (30, -0.5, pytest.approx(math.log10(0.9), abs=1e-3)),
            (30, 1.5, -3),
        ]
        assert set(coloured["width"]) == {10}
        assert (coloured["marker"]["cmin"], coloured["marker"]["cmax"]) == (-3, 0)
        assert figure.layout["yaxis"]["ticktext"] == ["1e-4–0.01", "0.1–1"]

    def test_caption_says_which_steps_and_summary_names_the_worst_cell(self) -> None:
        figure = drawn(self.FIGURE)
        assert "3 of 300 steps, equally far apart." in figure.caption
        assert figure.summary == (
            "Mean |d| is largest, 0.9, at step 30 for tokens of probability 1e-4–0.01 (2 tokens)."
        )


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

    def test_without_tokens_there_is_a_text(self) -> None:
        assert isinstance(token_figure("trainer/rollout", 7, [], [], ""), Missing)


def figure_of(http: httpx.Client, run: SentRun, path: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/pages/runs/{run.id}/{path}.json").raise_for_status().json()
    return found


def test_heat_map_agrees_with_the_buckets_of_every_step(site: Site) -> None:
    columns = figure_of(site.http, site.run, "figures/heat-map")["columns"]
    for step in range(1, 13):
        of_step = site.http.get(f"/v1/runs/{site.run.id}/steps/{step}/buckets").raise_for_status().json()["columns"]
        pairs = zip(of_step["tokens"], of_step["mean_abs_d"], strict=True)
        held = [(tokens, pytest.approx(mean)) for tokens, mean in pairs if tokens]
        at = [row for row, of in enumerate(columns["training step"]) if of == step]
        assert [(columns["tokens"][row], columns["mean |d|, nats"][row]) for row in at] == held


def test_heat_map_of_a_long_run_has_few_columns_and_the_newest_step(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 9
    monkeypatch.setattr(presenter, "MOST_STEPS", most)
    sender = start_run(http, "long")
    for step in range(1, 2 * most + 2):
        sender.put_shard(step, make_batch(4, seed=step)).raise_for_status()
    figure = http.get(f"/pages/runs/{sender.run}/figures/heat-map.json").raise_for_status().json()
    steps = sorted(set(figure["columns"]["training step"]))
    assert steps == list(range(1, 2 * most + 2, 3))
    assert f"{len(steps)} of {2 * most + 1} steps, equally far apart." in figure["caption"]
    # A new step joins the others, which stay.
    newest = 2 * most + 2
    sender.put_shard(newest, make_batch(4, seed=newest)).raise_for_status()
    columns = http.get(f"/pages/runs/{sender.run}/figures/heat-map.json").raise_for_status().json()["columns"]
    assert sorted(set(columns["training step"])) == [*steps, newest]


def test_run_without_two_scores_has_texts(http: httpx.Client) -> None:
    sender = start_run(http, "half")
    sender.put_shard(1, make_batch(trainer_log_probs=None)).raise_for_status()
    address = f"/pages/runs/{sender.run}"
    heat_map = http.get(f"{address}/figures/heat-map.json").raise_for_status().json()
    assert heat_map["missing"] == "No closed step has log-probs of two scorers yet."
    buckets = http.get(f"{address}/figures/buckets.json").raise_for_status().json()
    assert buckets["missing"] == "No closed step has log-probs of two scorers yet."
    tokens = http.get(f"{address}/steps/1/figures/tokens.json").raise_for_status().json()
    assert tokens["missing"] == "step 1 of attempt 1 has no trainer/rollout."


@pytest.mark.slow
class TestInTheBrowser:
    def test_a_cell_of_the_heat_map_opens_its_step(self, visit: Visit, site: Site) -> None:
        page = visit.open(site.url, site.run.address, unfold=True)
        cells = page.locator(f"{ON_HEAT_MAP} g.trace.bars path")
        figure = figure_of(site.http, site.run, "figures/heat-map")
        assert cells.count() == len(figure["columns"]["tokens"])
        colours = set(cells.evaluate_all("paths => paths.map((path) => getComputedStyle(path).fill)"))
        assert len(colours) > 5
        page.locator(ON_HEAT_MAP).scroll_into_view_if_needed()
        cells.last.hover(force=True)
        page.locator(f"{ON_HEAT_MAP} .hovertext", has_text="step 12").wait_for()
        cells.last.click(force=True)
        page.wait_for_url("**/steps/12")
        visit.assert_clean()

    def test_cells_touch_each_other_over_time_too(self, visit: Visit, fleet: Fleet) -> None:
        page = visit.open(fleet.url, f"{fleet.address('mismatch')}?x=time", unfold=True)
        assert page.locator("#curves").evaluate("form => form.elements.x.value") == "time"
        boxes = page.locator(f"{ON_HEAT_MAP} g.trace.bars").last.evaluate(
            "trace => [...trace.querySelectorAll('path')].map((path) => path.getBoundingClientRect().width)"
        )
        area = page.locator(f"{ON_HEAT_MAP} .nsewdrag").first.bounding_box()
        assert area is not None
        assert len(boxes) > 64
        assert sum(boxes) > 0.5 * area["width"]
        visit.assert_clean()

    def test_single_tokens_are_drawn_on_log_axes(self, visit: Visit, site: Site) -> None:
        page = visit.open(site.url, f"{site.run.address}/steps/5", unfold=True)
        figure = figure_of(site.http, site.run, "steps/5/figures/tokens")
        points = page.locator(f"{ON_TOKENS} g.trace path.point")
        assert points.count() == sum(len(trace["x"]) for trace in figure["data"])
        axes = page.locator(ON_TOKENS).evaluate("e => [e._fullLayout.xaxis.type, e._fullLayout.yaxis.type]")
        assert axes == ["log", "log"]
        assert "sampled tokens, half have" in str(page.locator(ON_TOKENS).get_attribute("aria-label"))
        visit.assert_clean()
