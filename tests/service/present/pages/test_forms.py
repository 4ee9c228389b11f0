"""Forms of the pages: they ask for a reason, need the token of their session, and do what the API does."""

import re

import httpx
import pytest

from tests.service.present.pages.conftest import SentRun, send_run
from tests.service.present.pages.test_pages import token_of


class TestForms:
    def test_alert_is_acknowledged_and_resolved_by_form(self, http: httpx.Client) -> None:
        run = send_run(http, "bad", steps=20, noise=0.4)
        page = http.get(run.address).text
        (form, *_) = re.findall(rf'action="({run.forms}/alerts/\w+)/acknowledge"', page)
        answer = http.post(f"{form}/acknowledge", data={"csrf_token": token_of(page)})
        assert (answer.status_code, answer.headers["location"]) == (303, run.address)
        page = http.get(run.address).text
        assert '<span class="badge">acknowledged</span>' in page
        assert http.post(f"{form}/resolve", data={"csrf_token": token_of(page)}).status_code == 422, "why?"
        reason = {"csrf_token": token_of(page), "reason": "a known step"}
        http.post(f"{form}/resolve", data=reason)
        assert f"{form}/resolve" not in http.get(run.address).text

    def test_a_form_that_is_sent_twice_halves_once(self, http: httpx.Client, own_run: SentRun) -> None:
        def forms() -> tuple[str, dict[str, str]]:
            page = http.get(own_run.address).text
            [address, *others] = set(re.findall(r'action="([^"]*/advice\?seen[^"]*)"', page))
            assert others == []
            return address, {"kind": "halve", "reason": "too steep", "csrf_token": token_of(page)}

        def scale() -> float:
            return float(http.get(f"/v1/runs/{own_run.id}/lr-advice").json()["advised_scale"])

        before = scale()
        form = forms()
        first, again = (http.post(form[0], data=form[1]) for _ in range(2))
        assert (first.status_code, again.status_code) == (303, 409)
        assert "an operator has decided since you saw it (halve, &#39;too steep&#39;)" in again.text
        assert scale() == before / 2
        address, data = forms()
        assert http.post(address, data=data).status_code == 303
        assert scale() == before / 4

    def test_operator_form_holds_and_applies_a_lever(self, http: httpx.Client, own_run: SentRun) -> None:
        page = http.get(own_run.address).text
        address = next(each for each in re.findall(r'action="([^"]*)"', page) if "lever=correction" in each)
        for kind in ("hold", "apply"):
            data = {"kind": kind, "reason": "a test", "csrf_token": token_of(page)}
            assert http.post(address.replace("&amp;", "&"), data=data).status_code == 303
        advice = http.get(f"/v1/runs/{own_run.id}/advice").json()
        assert (advice["correction"]["held_by"], advice["correction"]["mode"]) == ("operator", "apply")
        assert (advice["rollback"]["mode"], advice["rate"]["mode"]) == ("shadow", "shadow")
        assert "held by an operator." in http.get(own_run.address).text

    def test_operator_form_switches_to_apply_mode(self, http: httpx.Client, own_run: SentRun) -> None:
        token = token_of(http.get(own_run.address).text)
        http.post(f"{own_run.forms}/advice", data={"kind": "apply", "reason": "ready", "csrf_token": token})
        assert http.get(f"/v1/runs/{own_run.id}").json()["advice_mode"] == "apply"
        page = http.get(own_run.address).text
        assert "apply mode: the trainer uses this scale" in page
        assert "not acknowledged" in page
        acknowledged = {"revision": 1, "step": 3, "applied_lr": 2e-7, "applied_scale": 0.5}
        http.post(f"/v1/runs/{own_run.id}/lr-advice/ack", json=acknowledged).raise_for_status()
        page = http.get(own_run.address).text
        assert "applied 0.5 at step 3 (learning rate 2e-7)" in page
        assert "not acknowledged" not in page

    @pytest.mark.parametrize("token", ["", "0" * 64])
    def test_form_without_its_token_is_refused(self, http: httpx.Client, own_run: SentRun, token: str) -> None:
        answer = http.post(f"{own_run.forms}/advice", data={"kind": "hold", "reason": "a test", "csrf_token": token})
        assert answer.status_code == 403
        assert http.get(f"/v1/runs/{own_run.id}/lr-advice").json()["phase"] != "held"


def test_tags_note_and_baseline_are_set_on_the_page_and_shown_in_the_list(http: httpx.Client, own_run: SentRun) -> None:
    other = send_run(http, "other", steps=1)
    token = token_of(http.get(own_run.address).text)
    form = {"tags": "ablation, ablation, lr", "note": " <b>why</b> ", "baseline": "other", "csrf_token": token}
    http.post(f"{own_run.forms}/notes", data=form)
    run = http.get(f"/v1/runs/{own_run.id}").json()
    assert (run["tags"], run["note"], run["baseline"]) == (["ablation", "lr"], "<b>why</b>", other.id)
    page = http.get(own_run.address).text
    assert "&lt;b&gt;why&lt;/b&gt;" in page
    assert f"/compare?run={own_run.id}&amp;run={other.id}" in page
    assert re.search(r"<dt>Baseline</dt><dd>other: reward [0-9.]+; here reward [0-9.]+</dd>", page)
    names = re.findall(r"<bdi>([^<]+)</bdi>", http.get("/", params={"tag": "lr"}).text)
    assert names == [own_run.name]
    assert http.post(f"{own_run.forms}/notes", data=form | {"baseline": "nowhere"}).status_code == 404
    http.delete(f"/v1/runs/{other.id}").raise_for_status()
    page = http.get(own_run.address).raise_for_status().text
    assert other.id not in page, "a baseline that was deleted is not compared with"
