"""The measures of a step in groups: known names, intervals, tones, and words where nothing was logged."""

import html
import math
import re

import httpx
import numpy as np
import pytest

from foreshock.corrections import CORRECTIONS
from foreshock.measures.registry import measure_named
from foreshock.model_kind import ModelKind
from foreshock_service.present.pages.presenters import attribution
from foreshock_service.present.pages.rendering import Value
from tests.service.present.pages.conftest import SentRun, Site
from tests.service.sending import Sender, make_batch

WHOLE = "trainer/rollout"


def value_of(name: str, values: attribution.Values, model_kind: ModelKind | None = None) -> Value:
    rows = {
        row.name: row
        for group in attribution.measure_groups({WHOLE: values}, [WHOLE], model_kind)
        for row in group.rows
    }
    (value,) = rows[name].values
    return value


def group_called(
    title: str, values: attribution.Values, model_kind: ModelKind | None = None
) -> attribution.MeasureGroup:
    (found,) = [
        group for group in attribution.measure_groups({WHOLE: values}, [WHOLE], model_kind) if group.title == title
    ]
    return found


def test_every_measure_is_registered_and_shown_once() -> None:
    names = [name for names in attribution.GROUPS.values() for name in names]
    assert len(set(names)) == len(names)
    assert all(measure_named(name).name == name for name in names)


def test_interval_is_of_the_bootstrap_or_labelled_students_t() -> None:
    students = {"k3_kl": 1e-4, "k3_kl_low": 5e-5, "k3_kl_high": 1.5e-4}
    assert value_of("k3_kl", students).interval == "Student's t: 5e-5 to 1.5e-4"
    both = {**students, "k3_kl_bootstrap_low": 6e-5, "k3_kl_bootstrap_high": 2e-4}
    assert value_of("k3_kl", both).interval == "range: 6e-5 to 2e-4"
    assert value_of("k3_kl", {"k3_kl": 1e-4}).interval is None


@pytest.mark.parametrize(
    ("name", "values", "tone"),
    [
        ("pareto_k", {"pareto_k": 0.8, "max_d": 2.0}, "critical"),
        ("pareto_k", {"pareto_k": 0.6, "max_d": 2.0}, "warning"),
        ("pareto_k", {"pareto_k": 0.4, "max_d": 2.0}, ""),
        # If no ratio reaches e, a heavy tail changes no mean.
        ("pareto_k", {"pareto_k": 0.8, "max_d": 0.2}, ""),
        ("pareto_k", {"pareto_k": None, "max_d": 2.0}, ""),
        ("pareto_k_inverse", {"pareto_k_inverse": 0.8, "min_d": -3.0}, "critical"),
        ("k3_kl", {"k3_kl": 0.02}, "critical"),
    ],
)
def test_a_tone_is_of_a_published_range(name: str, values: attribution.Values, tone: str) -> None:
    assert value_of(name, values).tone == tone


def test_the_tone_follows_the_kind_of_model() -> None:
    tones = [value_of("k3_kl", {"k3_kl": 5e-3}, kind).tone for kind in (None, "dense", "moe")]
    assert tones == ["warning", "warning", ""]
    assert value_of("tail(2)", {"tail_2": 0.2}, "moe").tone == "critical"


MIXED: attribution.Values = {
    "k3_kl": 0.066, "tail_2": 0.2, "tokens": 1000, "tokens_lag_0": 250, "tokens_lag_5_8": 750, "k3_kl_lag_0": 5e-4,
    "k3_kl_lag_5_8": 0.088, "pareto_k": 0.8, "max_d": 2.0,
}  # fmt: skip


def test_of_mixed_lags_the_range_judges_the_tokens_at_lag_zero() -> None:
    """The diagnosis of such a run is healthy: no value beside it is called critical for its stale tokens."""
    tones = {name: value_of(name, MIXED).tone for name in ("k3_kl", "tail(2)", "k3_kl(lag 0)", "k3_kl(lag 5-8)")}
    assert tones == {"k3_kl": "", "tail(2)": "", "k3_kl(lag 0)": "", "k3_kl(lag 5-8)": ""}
    assert value_of("k3_kl(lag 0)", {**MIXED, "k3_kl_lag_0": 0.05}).tone == "critical"
    assert value_of("k3_kl(lag 0)", {**MIXED, "k3_kl_lag_0": 0.05, "tokens_lag_0": 20}).tone == ""
    # The trust in a mean does not depend on the lag.
    assert value_of("pareto_k", MIXED).tone == "critical"
    nearly_fresh = {**MIXED, "tokens_lag_0": 996, "tokens_lag_5_8": 4}
    assert value_of("tail(2)", nearly_fresh).tone == "critical"


def test_of_mixed_lags_k3_at_lag_zero_comes_first() -> None:
    for values, first in ((MIXED, ["k3_kl(lag 0)", "k3_kl"]), ({"k3_kl": 5e-4, "tail_2": 0.0}, ["k3_kl", "max_abs_d"])):
        rows = attribution.measures_at_a_glance(attribution.measure_groups({WHOLE: values}, [WHOLE], None), values)
        assert [row.name for row in rows][:2] == first


def test_infinite_values_are_shown_as_too_large() -> None:
    assert value_of("chi2_token", {"chi2_token": math.inf}).text == "too large"
    assert value_of("tail_asymmetry(1)", {"tail_asymmetry_1": -math.inf}).text == "−too large"
    assert value_of("k3_kl", {"k3_kl": math.inf}) == Value("too large", "critical")
    assert value_of("chi2_token", {"chi2_token": None}).text == "–"


def test_group_without_values_names_the_columns_to_log() -> None:
    without = group_called("With advantages", {"k3_kl": 1e-4})
    assert (list(without.rows), without.missing.endswith(".")) == ([], True)
    assert "advantage" in without.missing
    having = group_called("With advantages", {"advantage_d_cov": 1e-4})
    assert (having.missing, len(having.rows)) == ("", 5)


def test_no_token_of_any_lag_is_no_table_of_lags() -> None:
    assert "weights_version" in group_called("By lag", {"tokens_lag_0": 0, "tokens_lag_1": 0}).missing
    assert group_called("By lag", {"tokens_lag_0": 3, "k3_kl_lag_0": 1e-4}).missing == ""


def part_of(http: httpx.Client, run: SentRun, step: int) -> str:
    return html.unescape(http.get(f"/pages/runs/{run.id}/steps/{step}/corrections").raise_for_status().text)


def test_step_shows_the_effect_of_every_correction(site: Site) -> None:
    page = site.http.get(f"{site.run.address}/steps/5").raise_for_status().text
    assert f'data-fragment="/pages/runs/{site.run.id}/steps/5/corrections"' in page
    part = part_of(site.http, site.run, 5)
    for correction in CORRECTIONS.values():
        assert correction.title in part, correction.name
    assert "Nothing was applied" in part
    assert '<th scope="row">token TIS 2</th>' in part
    assert '<th scope="row">IcePop 0.5 to 5</th>' in part


def test_page_and_api_have_the_same_values(site: Site) -> None:
    part = part_of(site.http, site.run, 5)
    query = {"correction": "geo_mis", "threshold": "0.999_1.001"}
    (item,) = site.http.get(f"/v1/runs/{site.run.id}/steps/5/corrections", params=query).json()["items"]
    (row,) = re.findall(r'<tr><th scope="row">Geo-MIS 0\.999 to 1\.001</th>.*?</tr>', part)
    cells = dict(re.findall(r'data-column="([^"]+)"[^>]*>([^<]*)<', row))
    assert 0 < item["kept_sequences"] < 1
    assert float(cells["Sequences kept"].split()[0]) / 100 == round(item["kept_sequences"], 3)
    assert float(cells["Beyond"]) == item["affected"]["touched"]["sequences"]
    lost, kept = (float(text) for text in cells["Reward beyond / within"].split(" / "))
    affected = item["affected"]
    assert abs(lost - affected["touched"]["reward_mean"]) < 1e-2
    assert abs(kept - affected["untouched"]["reward_mean"]) < 1e-2
    # No rollout of this run has turns or advantages, so the page omits their columns.
    assert "Turns" not in part
    assert "·A]" not in part


def test_theory_marks_extrapolations_and_missing_values(site: Site) -> None:
    part = part_of(site.http, site.run, 5)
    assert "An extrapolation, no bound" in part
    assert "supremum over states" in part
    assert "this step logs no scalar grad_norm_micro_batch" in part
    assert "The trivial bound 2·B·T·max|R|" in part


def test_logged_norms_give_the_gradient_noise(http: httpx.Client, own_run: SentRun) -> None:
    values = {"grad_norm_micro_batch": 2.0, "grad_norm_batch": 1.0, "micro_batch_prompts": 1.0, "batch_prompts": 8.0}
    http.put(f"/v1/runs/{own_run.id}/steps/1/scalars", json={"values": values}).raise_for_status()
    part = part_of(http, own_run, 1)
    assert "3.43" in part
    assert "η = 1e-4 (the run's initial learning rate, because the step has none of its own)" in part


def test_step_without_two_scores_has_a_text_instead_of_corrections(sender: Sender, http: httpx.Client) -> None:
    sender.put_shard(0, make_batch(trainer_log_probs=None)).raise_for_status()
    run = SentRun(sender.run, "a-run", "one score")
    assert "has no trainer/rollout" in part_of(http, run, 0)
    nothing_sampled = make_batch(response_mask=np.zeros(make_batch().num_tokens, np.uint8))
    sender.put_shard(1, nothing_sampled).raise_for_status()
    assert "No token of this step" in part_of(http, run, 1)


def test_turns_and_advantages_are_shown_if_logged(sender: Sender, http: httpx.Client) -> None:
    tokens = make_batch().num_tokens
    batch = make_batch(turn=np.zeros(tokens, np.int16), advantage=np.ones(tokens, np.float32))
    sender.put_shard(0, batch).raise_for_status()
    part = part_of(http, SentRun(sender.run, "a-run", "turns"), 0)
    assert 'data-column="Turns beyond / within" class="number">– / 1<' in part
    assert 'data-column="E[(w − ρ)·A]"' in part
