"""Corrections and theory on the page of a step."""

from __future__ import annotations

import html
import re

import httpx
import numpy as np

from foreshock.corrections import CORRECTIONS
from tests.service.present.pages.conftest import SentRun, Site
from tests.service.sending import make_batch, start_run


def part_of(http: httpx.Client, run: SentRun, step: int) -> str:
    """The part as text."""
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


def test_step_without_two_scores_has_a_text_instead_of_corrections(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(0, make_batch(trainer_log_probs=None)).raise_for_status()
    run = SentRun(sender.run, "a-run", "one score")
    assert "has no trainer/rollout" in part_of(http, run, 0)
    nothing_sampled = make_batch(response_mask=np.zeros(make_batch().num_tokens, np.uint8))
    sender.put_shard(1, nothing_sampled).raise_for_status()
    assert "No token of this step" in part_of(http, run, 1)


def test_turns_and_advantages_are_shown_if_logged(http: httpx.Client) -> None:
    sender = start_run(http)
    tokens = make_batch().num_tokens
    batch = make_batch(turn=np.zeros(tokens, np.int16), advantage=np.ones(tokens, np.float32))
    sender.put_shard(0, batch).raise_for_status()
    part = part_of(http, SentRun(sender.run, "a-run", "turns"), 0)
    assert 'data-column="Turns beyond / within" class="number">– / 1<' in part
    assert 'data-column="E[(w − ρ)·A]"' in part
