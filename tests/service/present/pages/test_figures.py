"""Figures say what the curves say, and say in words what they cannot draw."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.api.attribution import AttributionRecord, LinkRecord
from foreshock.measures.estimators.attribution import attribute
from foreshock.measures.statistics.conditions import BucketTable
from foreshock.measures.statistics.token_ids import TokenIdTable
from foreshock.model_kind import ModelKind
from foreshock_service.present.pages.figures import Curve, Figure, Missing, drawing, overview
from foreshock_service.present.pages.figures.attribution import attribution_figure, token_figure
from foreshock_service.present.pages.figures.buckets import BY, bucket_figure, token_id_figure
from foreshock_service.present.pages.figures.drawing import scientific
from foreshock_service.present.pages.figures.mismatch import mismatch_figure
from tests.foreshock.commands.attributions import attribution_of
from tests.service.sending import make_batch, start_run

EMPTY = Curve((), ())


def drawn(figure: Figure | Missing) -> Figure:
    assert isinstance(figure, Figure), figure
    json.dumps(figure.to_json(), allow_nan=False)
    return figure


def trace_named(figure: Figure, name: str) -> dict[str, Any]:
    (found,) = [trace for trace in figure.traces if trace.get("name") == name and trace.get("showlegend", True)]
    return found


class TestMismatch:
    @pytest.mark.parametrize(("kind", "warning", "critical"), [(None, 1e-3, 1e-2), ("moe", 1e-2, 1e-1)])
    def test_bands_are_the_published_ranges(self, kind: ModelKind | None, warning: float, critical: float) -> None:
        figure = drawn(mismatch_figure({"trainer/rollout": Curve([1, 2], [1e-5, 2e-5])}, kind))
        bands = [(shape["y0"], shape["y1"]) for shape in figure.layout["shapes"]]
        low, high = (10**edge for edge in figure.layout["yaxis"]["range"])
        assert [bottom for bottom, _ in bands] == [pytest.approx(low), warning, critical]
        assert [top for _, top in bands] == [warning, critical, pytest.approx(high)]
        assert figure.layout["yaxis"]["type"] == "log"
        assert ("judged" in figure.caption or "unknown" in figure.caption) == (kind is None)

    @given(st.lists(st.floats(1e-12, 1e3), min_size=1, max_size=30))
    def test_every_positive_value_lies_inside_the_axis(self, values: list[float]) -> None:
        figure = drawn(mismatch_figure({"trainer/rollout": Curve(range(len(values)), values)}))
        low, high = figure.layout["yaxis"]["range"]
        assert all(low < math.log10(value) < high for value in values)

    def test_zeros_are_not_drawn_on_the_log_axis_but_counted_in_the_caption(self) -> None:
        figure = drawn(
            mismatch_figure(
                {
                    "trainer/rollout": Curve([1, 2, 3], [1e-5, 0.0, 2e-5]),
                    "vllm.prefill/rollout": Curve([1, 3], [0.0, 0.0]),
                }
            )
        )
        assert trace_named(figure, "trainer/rollout")["y"] == [1e-5, None, 2e-5]
        assert trace_named(figure, "vllm.prefill/rollout")["y"] == [None, None]
        assert "trainer/rollout is exactly 0 at 1 of 3 steps" in figure.caption
        assert "vllm.prefill/rollout is exactly 0 at 2 of 2 steps" in figure.caption

    def test_long_curve_is_shown_as_mean_and_range(self) -> None:
        values = [1e-5] * 10_000
        values[5_000] = 1e-3
        figure = drawn(mismatch_figure({"trainer/rollout": Curve(range(10_000), values)}))
        least, largest, mean = figure.traces
        assert (min(least["y"]), max(largest["y"])) == (1e-5, 1e-3)
        assert 1e-5 < max(mean["y"]) < 1e-3
        assert len(mean["y"]) <= overview.MOST_COLUMNS
        assert "bands: their range" in figure.caption

    def test_the_summary_gives_the_newest_value_and_the_extremes(self) -> None:
        figure = drawn(mismatch_figure({"trainer/rollout": Curve([1, 2, 3], [4e-5, 1e-5, 2e-5])}))
        assert figure.summary == "trainer/rollout: 2e-5 at step 3, between 1e-5 and 4e-5 over 3 steps."

    @given(st.lists(st.floats(-1, 1), min_size=1, max_size=1000), st.integers(1, 50))
    def test_columns_keep_the_extremes_and_the_mean_lies_between(self, values: list[float], stride: int) -> None:
        steps, means, low, high = overview.columns_of(Curve(range(0, stride * len(values), stride), values))
        assert len(steps) == len(means) <= max(overview.MOST_COLUMNS, 1)
        assert (min(low), max(high)) == (min(values), max(values))
        assert all(a - 1e-12 <= mean <= b + 1e-12 for a, mean, b in zip(low, means, high, strict=True))
        assert list(steps) == sorted(set(steps))


class TestLearningRate:
    STAIRS = ((0, 1.0), (198, 0.5), (396, 0.25), (594, 0.125), (792, 0.1))

    def test_past_scale_is_solid_and_planned_scale_is_dotted(self) -> None:
        figure = drawn(overview.learning_rate_figure(overview.ScaleCurve(self.STAIRS, now=240, end=900, shadow=False)))
        past, plan = figure.traces
        assert list(zip(past["x"], past["y"], strict=True)) == [(0, 1.0), (198, 0.5), (240, 0.5)]
        assert list(zip(plan["x"], plan["y"], strict=True)) == [
            (240, 0.5), (396, 0.25), (594, 0.125), (792, 0.1), (900, 0.1),
        ]  # fmt: skip
        assert plan["line"]["dash"] == "dot"
        assert figure.summary == "Scale 0.5 at step 240. Next change: 0.25 from step 396."

    def test_shadow_mode_is_in_the_caption(self) -> None:
        figure = drawn(overview.learning_rate_figure(overview.ScaleCurve(self.STAIRS, now=240, end=900, shadow=True)))
        assert "the trainer gets 1.0" in figure.caption

    def test_many_stairs_are_thinned_and_keep_the_lowest_and_the_highest_of_neighbours(self) -> None:
        stairs = [(step, 0.5 + 0.4 * math.sin(step / 300) + 0.05 * (step % 7 == 0)) for step in range(20_000)]
        past = drawn(
            overview.learning_rate_figure(overview.ScaleCurve(stairs, now=19_999, end=20_019, shadow=False))
        ).traces[0]
        points = list(zip(past["x"], past["y"], strict=True))
        assert len(points) <= drawing.MOST_POINTS
        assert points == sorted(points)
        assert set(points) <= set(stairs)
        assert (points[0], points[-1]) == (stairs[0], stairs[-1])
        for part in range(0, 20_000, 200):
            kept, every = ([scale for step, scale in each if part <= step < part + 200] for each in (points, stairs))
            assert max(kept) == pytest.approx(max(every), abs=0.03)
            assert min(kept) == pytest.approx(min(every), abs=0.03)


def bucket_table(
    edges: Sequence[float], tokens: Sequence[int], mean_abs_d: Sequence[float], max_abs_d: Sequence[float]
) -> BucketTable:
    unused = np.full(len(tokens), math.nan)
    return BucketTable(
        np.array(edges), np.array(tokens), np.array(mean_abs_d), unused, unused, np.array(max_abs_d), unused
    )


def bucket_figure_of(table: BucketTable, by: str = "probability") -> Figure | Missing:
    return bucket_figure("trainer/rollout", 7, BY[by], table)


def token_id_figure_of(
    token_ids: Sequence[int], tokens: Sequence[int], k3_sum: Sequence[float], missing: Sequence[float]
) -> Figure | Missing:
    unused = np.full(len(tokens), math.nan)
    sums, at_most = np.array(k3_sum), np.array(missing)
    table = TokenIdTable(np.array(token_ids), np.array(tokens), unused, unused, unused, sums, at_most, 0.0)
    return token_id_figure("trainer/rollout", 7, table)


class TestBuckets:
    TABLE = bucket_table(
        [0.0, 1e-8, 1e-4, 0.1, 1.0], [0, 3, 0, 500], [math.nan, 0.2, math.nan, 0.0], [math.nan, 0.4, math.nan, 0.0]
    )

    def test_empty_buckets_at_the_ends_are_left_out_and_inside_they_stay(self) -> None:
        figure = drawn(bucket_figure_of(self.TABLE))
        assert trace_named(figure, "tokens")["x"] == ["1e-8–1e-4", "1e-4–0.1", "0.1–1"]
        assert trace_named(figure, "tokens")["y"] == [3, None, 500]
        assert trace_named(figure, "mean |d|")["y"] == [0.2, None, None]

    def test_the_summary_names_the_worst_bucket(self) -> None:
        assert drawn(bucket_figure_of(self.TABLE)).summary == (
            "Mean |d| is largest, 0.2, if the probability is 1e-8–1e-4 (3 of 503 tokens)."
        )

    @pytest.mark.parametrize(
        ("tokens", "dtick"), [([1, 2, 3], "D2"), ([1, 2000, 3], 2), ([1, 3_000_000, 20], 3), ([0, 7, 0], "D2")]
    )
    def test_axis_over_many_decades_has_no_more_labels_than_fit(self, tokens: list[int], dtick: int | str) -> None:
        table = bucket_table([0.0, 0.1, 0.2, 1.0], tokens, [0.1] * 3, [1e300, math.inf, 1e-300])
        layout = drawn(bucket_figure_of(table)).layout
        assert layout["yaxis2"]["dtick"] == dtick
        assert layout["yaxis"]["dtick"] in ("D2", 100)

    @pytest.mark.parametrize(
        ("by", "edges", "names"),
        [
            ("position", [0.0, 1.0, 3.0, 7.0], ["0", "1–2", "3–6"]),
            ("lag", [-math.inf, 0.0, 1.0, math.inf], ["< 0", "0", "≥ 1"]),
            ("entropy", [0.0, 1e-6, 10.0, math.inf], ["< 1e-6", "1e-6–10", "≥ 10"]),
        ],
    )
    def test_buckets_of_counts_name_whole_numbers(self, by: str, edges: list[float], names: list[str]) -> None:
        figure = drawn(bucket_figure_of(bucket_table(edges, [1, 2, 3], [0.1, 0.2, 0.3], [1.0, 1.0, 1.0]), by))
        assert trace_named(figure, "tokens")["x"] == names
        assert figure.title == f"Mismatch by {BY[by].choice}"
        assert figure.summary.endswith(f"is {names[2]} (3 of 6 tokens).")

    def test_token_ids_are_drawn_with_their_possible_remainder(self) -> None:
        figure = drawn(token_id_figure_of([151643, 9, 4], [2, 100, 50], [3.0, 0.5, 0.0], [0.0, 0.25, 0.0]))
        bars = trace_named(figure, "Σ k3")
        assert (bars["x"], bars["y"]) == (["151643", "9"], [3.0, 0.5])
        assert bars["error_y"]["array"] == [0.0, 0.25]
        assert "Token id 151643 has the largest Σ k3, 3 nats in 2 tokens" in figure.summary
        assert isinstance(token_id_figure_of([4], [50], [0.0], [0.0]), Missing)


def link(name: str, cause: str, share: float, low: float = math.nan, high: float = math.nan) -> LinkRecord:
    sizes = dict.fromkeys(("k3_kl", "excess_k3_kl", "mean_d", "rms_d", "max_abs_d"), math.nan)
    return LinkRecord(name=name, cause=cause, share=share, share_low=low, share_high=high, **sizes)


def attribution_at_seven(*links: LinkRecord) -> AttributionRecord:
    found = attribute({"rollout": np.zeros(4), "trainer": np.ones(4)}, np.arange(3) * 2, None, ["a", "b"])
    return replace(attribution_of(7, found), links=links)


class TestAttribution:
    READ = attribution_at_seven(
        link("vllm.prefill/rollout", "decode against prefill", 0.0, 0.0, 0.0),
        link("torch.trainer/vllm.prefill", "numerics between engine and trainer", 1.04, 0.9, 1.1),
        link("trainer/torch.trainer", "trainer against replay", -0.04),
    )

    def test_bars_of_links_are_stacked_and_end_at_the_whole(self) -> None:
        figure = drawn(attribution_figure(self.READ))
        bars = figure.traces[0]
        ends = [base + share for base, share in zip(bars["base"], bars["x"], strict=True)]
        assert bars["base"] == [0.0, *ends[:-1]]
        assert ends[-1] == pytest.approx(1.0)

    def test_whiskers_are_the_interval_around_the_bars_end(self) -> None:
        errors = drawn(attribution_figure(self.READ)).traces[1]
        assert errors["y"] == [0, 1]
        assert errors["error_x"]["array"] == pytest.approx([0.0, 0.06])
        assert errors["error_x"]["arrayminus"] == pytest.approx([0.0, 0.14])

    def test_a_negative_share_is_shown_as_such_and_inside_the_axis(self) -> None:
        figure = drawn(attribution_figure(attribution_at_seven(link("a/b", "one", -0.5))))
        assert "−50 %" in figure.layout["annotations"][0]["text"]
        assert figure.layout["xaxis"]["range"][0] < -0.5

    def test_summary_and_notes_are_texts(self) -> None:
        figure = drawn(attribution_figure(self.READ, ("Over 64 of 128 rollouts.",)))
        assert "numerics between engine and trainer (torch.trainer/vllm.prefill): 104 %, interval 90 % to 110 %." in (
            figure.summary
        )
        assert figure.caption.startswith("Step 7. Over 64 of 128 rollouts.")

    def test_no_replay_and_no_mismatch_have_different_texts(self) -> None:
        nothing = attribution_figure(None)
        agreement = attribution_figure(
            attribution_at_seven(link("a/b", "one", math.nan)), ("a and b do not differ at any token.",)
        )
        assert isinstance(nothing, Missing)
        assert isinstance(agreement, Missing)
        assert "probe" in nothing.why
        assert agreement.why == "Step 7. a and b do not differ at any token."


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.2e-05, "1.2e-5"), (1e-08, "1e-8"), (0.0012, "0.0012"), (-3e-7, "-3e-7"),
        (999.4, "999"), (999.6, "1000"), (3008.6, "3009"), (-12345.2, "-12345"), (123456.0, "1.23e5"),
        (1.0, "1"), (0.99997512, "0.999975"), (1.00031, "1.00031"), (0.9951, "0.9951"), (0.9949, "0.995"),
        (1 + 1e-9, "1"), (-0.9999, "-1"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert scientific(value) == text


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_non_finite_values_never_reach_the_browser(value: float) -> None:
    figure = Figure("t", "c", "s", [{"y": [value, {"z": (value,)}]}], {"range": [value]})
    json.dumps(figure.to_json(), allow_nan=False)


class TestChanges:
    def test_each_of_the_newest_changes_is_a_line_and_the_caption_says_what_changed(self) -> None:
        figure = Figure("k3", "Caption.", "summary", [], {"shapes": [{"type": "rect"}]})
        marks = [overview.Mark(step, f"engine.dtype {step} → {step + 1}") for step in range(overview.MOST_CHANGES + 2)]
        found = drawn(overview.marked(figure, marks, []))
        assert [shape.get("x0") for shape in found.layout["shapes"]] == [None, *range(2, overview.MOST_CHANGES + 2)]
        assert found.caption.startswith("Caption. Dotted: changes at step 49, engine.dtype 49 → 50; ")

    def test_alerts_are_marks_on_the_axis_the_gravest_above_the_others(self) -> None:
        marks = [
            overview.Mark(5, "rise", "critical"),
            overview.Mark(5, "rise", "warning"),
            overview.Mark(9, "rise", "warning"),
        ]
        found = drawn(overview.marked(Figure("k3", "Caption.", "", []), marks, [overview.Mark(3, "attempt 2")]))
        ticks = [shape for shape in found.layout["shapes"] if shape.get("y1") != 1]
        colours = {tick["x0"]: tick["line"]["color"] for tick in ticks}
        assert colours == {5: "var(--critical)", 9: "var(--warning)"}
        assert found.layout["annotations"][0]["text"] == "attempt 2"
        assert found.caption == "Caption. Marks on the axis: alerts."


class TestOverview:
    def test_panels_share_the_steps_and_say_their_newest_value(self) -> None:
        panels = [
            overview.Panel("Reward", Curve([1, 2], [0.1, 0.25])), overview.Panel("Entropy", EMPTY),
            overview.Panel("k3", Curve([1, 2], [1e-5, 0.0]), logarithmic=True,
                           lines={"warning": (1e-4, "var(--warning)")}),
        ]  # fmt: skip
        figure = drawn(
            overview.overview_figure("All", "Caption.", panels, [overview.Mark(2, "x", "critical")], why_missing="")
        )
        assert figure.layout["panels"] == 2
        assert figure.layout["xaxis2"]["matches"] == "x"
        assert [each["text"] for each in figure.layout["annotations"]] == [
            "Reward, newest <b>0.25</b>",
            "k3, newest <b>0</b>",
        ]
        assert figure.caption == "Caption. Not logged: Entropy."
        assert "Reward: 0.25 at step 2, between 0.1 (step 1) and 0.25 (step 2)." in figure.summary
        assert figure.traces[-1]["y"] == [1e-5], "a log axis cannot show 0"

    @pytest.mark.parametrize(("largest", "shown"), [(0.15, [0.01, 0.1]), (0.005, [0.01]), (0.0001, [])])
    def test_a_threshold_is_drawn_where_the_curve_comes_near_it(self, largest: float, shown: list[float]) -> None:
        lines = {"warning": (0.01, "var(--warning)"), "critical": (0.1, "var(--critical)")}
        panel = overview.Panel("F(2)", Curve([1, 2], [0.0, largest]), lines=lines)
        figure = drawn(overview.overview_figure("Tails", "", [panel], [], why_missing=""))
        assert [shape["y0"] for shape in figure.layout["shapes"]] == shown


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
