"""The page of a run's rules: what watches it, and one changed, disabled, reset or added by a form."""

from __future__ import annotations

import html
import re

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import Page

from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.rule import ThresholdRule
from foreshock_service.platform.keys import Scope
from foreshock_service.present.pages.presenters.advice import threshold_in_words
from tests.service.keys import make_key
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import SentRun, Site, send_run
from tests.service.present.pages.test_accessibility import serious


def token_of(http: httpx.Client, run: SentRun) -> str:
    found = re.search(r'name="csrf_token" value="([^"]+)"', http.get(f"{run.address}/rules").text)
    assert found is not None
    return found[1]


def post(http: httpx.Client, run: SentRun, rule: str, **fields: str) -> httpx.Response:
    body = {"csrf_token": token_of(http, run), "first_step": "5", "reason": "a test", **fields}
    return http.post(f"{run.forms}/rules/{rule}", data=body)


def card(http: httpx.Client, run: SentRun, rule: str) -> str:
    page = html.unescape(http.get(f"{run.address}/rules").raise_for_status().text)
    return page.partition(f'id="rule-{rule}"')[2].partition("</li>")[0]


def rule_of(http: httpx.Client, run: SentRun, name: str, step: int) -> dict[str, object] | None:
    found = http.get(f"/v1/runs/{run.id}/rules", params={"step": step}).raise_for_status().json()["rules"]
    return next((each for each in found if each["name"] == name), None)


def test_every_rule_is_shown_with_threshold_effect_and_source(site: Site) -> None:
    page = html.unescape(site.http.get(f"{site.run.address}/rules").raise_for_status().text)
    for rule in default_rules(None):
        shown = page.partition(f'id="rule-{rule.name}"')[2].partition("</li>")[0]
        assert threshold_in_words(rule) in shown, rule.name
        assert rule.source in shown, rule.name
        assert rule.key in shown, rule.name
    assert "None: the default rules watch this run." in page
    assert f'href="{site.run.address}/rules"' in site.http.get(site.run.address).text


def test_changed_rule_holds_from_its_step_on_and_says_since_when(http: httpx.Client, own_run: SentRun) -> None:
    answer = post(http, own_run, "mismatch_rise", action="change", relative="4.5", severity="critical")
    assert (answer.status_code, answer.headers["location"]) == (303, f"{own_run.address}/rules")
    before, after = rule_of(http, own_run, "mismatch_rise", 4), rule_of(http, own_run, "mismatch_rise", 5)
    assert before is not None
    assert after is not None
    assert (after["relative"], after["severity"]) == (4.5, "critical")
    assert before["relative"] != 4.5
    shown = card(http, own_run, "mismatch_rise")
    assert "changed since step 5" in shown
    assert f"relative 4.5, default {before['relative']:g}" in shown


def test_one_change_keeps_those_before_it(http: httpx.Client, own_run: SentRun) -> None:
    schedule = {"toml": "version = 1\n[schedule]\nmultiplier = 2.5\n"}
    http.put(f"/v1/runs/{own_run.id}/rules", json=schedule).raise_for_status()
    post(http, own_run, "mismatch_rise", action="change", relative="4.5")
    post(http, own_run, "entropy_fall", action="disable", first_step="7")
    post(http, own_run, "gradient_rise", action="change", relative="9", first_step="8")
    kept = http.get(f"/v1/runs/{own_run.id}/rules", params={"step": 9}).raise_for_status().json()["toml"]
    assert "[schedule]\nmultiplier = 2.5" in kept
    assert rule_of(http, own_run, "entropy_fall", 8) is None
    assert "off since step 7" in card(http, own_run, "entropy_fall")
    for name, relative in (("mismatch_rise", 4.5), ("gradient_rise", 9.0)):
        rule = rule_of(http, own_run, name, 8)
        assert rule is not None
        assert rule["relative"] == relative
    assert "changed since step 5" in card(http, own_run, "mismatch_rise"), "newer versions changed other rules"
    post(http, own_run, "entropy_fall", action="default", first_step="9")
    post(http, own_run, "mismatch_rise", action="default", first_step="9")
    assert rule_of(http, own_run, "entropy_fall", 9) is not None
    assert 'class="badge warning">' not in card(http, own_run, "mismatch_rise").partition("</summary>")[0].replace(
        '<span class="badge warning">warning</span>', ""
    )
    newest = http.get(f"/v1/runs/{own_run.id}/rules").json()["versions"][-1]["toml"]
    assert re.findall(r"\[rules\.(\w+)\]", newest) == ["gradient_rise"]


def test_rule_is_added_by_a_file_and_removed_by_a_form(http: httpx.Client, own_run: SentRun) -> None:
    toml = "version = 1\r\neffective_from_step = 3\r\n[rules.own]\r\nkey = 'scalars:x'\r\nabsolute = 1.0\r\n"
    toml += "severity = 'info'\r\nwhy = 'w'\r\nwhat_to_do = 'd'\r\n"
    body = {"csrf_token": token_of(http, own_run), "toml": toml, "reason": "a test"}
    assert http.post(f"{own_run.forms}/rules", data=body).status_code == 303
    assert "added since step 3" in card(http, own_run, "own")
    assert post(http, own_run, "own", action="disable").status_code == 303
    assert rule_of(http, own_run, "own", 5) is None


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("rule", "fields", "status", "message"),
    [
        ("mismatch_rise", {"action": "change", "relative": "0.5"}, 422, "must be above 1"),
        ("mismatch_warning", {"action": "change", "effect": "halve"}, 422, "an absolute crossing alone never moves"),
        ("mismatch_ris", {"action": "disable"}, 404, "the run has no rule"),
        ("mismatch_rise", {"action": "disable", "csrf_token": "another"}, 403, "form is of another session"),
    ],
)
def test_refused_change_says_why_and_changes_nothing(
    http: httpx.Client, own_run: SentRun, rule: str, fields: dict[str, str], status: int, message: str
) -> None:
    answer = post(http, own_run, rule, **fields)
    assert answer.status_code == status
    assert message in answer.text
    assert http.get(f"/v1/runs/{own_run.id}/rules").json()["versions"] == []


def test_threshold_in_words() -> None:
    def words(**fields: object) -> str:
        texts = {"name": "n", "key": "a:b", "severity": "info", "why": "", "what_to_do": "", "source": ""}
        return threshold_in_words(ThresholdRule(**{**texts, **fields}))  # type: ignore[arg-type]

    assert words(absolute=0.01) == "above 0.01"
    assert words(absolute=0.01, relative=3.0) == "above 0.01 and above 3 × the baseline"
    assert words(relative=0.5, direction="below") == "below 0.5 × the baseline"
    assert words(absolute=0.1, direction="away", ideal=1.0) == "farther than 0.1 from 1"
    assert words(relative=2.0, reference="x:y") == "above 2 × x:y"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_operator_changes_a_rule_in_the_browser(visit: Visit, site: Site, width: int) -> None:
    run = send_run(site.http, f"ruled {width}", steps=2)
    page: Page = visit.page
    page.set_viewport_size({"width": width, "height": 844})
    visit.origin = site.url
    visit.go(site.url + run.address)
    visit.follow(page.get_by_role("link", name="Rules"))
    assert page.evaluate("document.documentElement.scrollHeight") < 5 * 844
    rule = page.locator("#rule-mismatch_rise")
    rule.locator("summary").click()
    assert rule.get_by_label("From step").input_value() == "3"
    rule.get_by_label("Relative").fill("7")
    rule.get_by_label("Reason").fill("a test")
    rule.get_by_role("button", name="Change").click()
    page.get_by_text("changed since step 3").wait_for()
    page.locator("#rule-mismatch_rise summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert serious(page) == []
    visit.assert_clean()


def test_reader_without_the_scope_gets_no_form_and_is_refused(http: httpx.Client, app: FastAPI) -> None:
    run = send_run(http, "own", steps=1)
    assert "<textarea" in http.get(f"{run.address}/rules").text
    _, headers = make_key(app.state.context.database, Scope.READ)
    page = http.get(f"{run.address}/rules", headers=headers).raise_for_status().text
    assert 'id="rule-mismatch_rise"' in page
    assert "<form" not in page
    answer = http.post(
        f"{run.forms}/rules/mismatch_rise",
        data={"action": "disable", "first_step": "1", "reason": "r"},
        headers=headers,
    )
    assert answer.status_code == 403
