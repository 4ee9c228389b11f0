"""Twelve questions, each answered from the page of runs in at most two clicks, as the API answers them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page

from foreshock_service.present.pages.rendering import number
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import Fleet
from tests.service.present.pages.fleet import KINDS, REPLAYED_STEP

pytestmark = pytest.mark.slow
MOST_CLICKS = 2


class Reader:
    """A person who begins at the page of runs, and clicks at most twice."""

    def __init__(self, visit: Visit, fleet: Fleet) -> None:
        self.clicks = 0
        self.page: Page = visit.page
        visit.origin = fleet.url
        visit.open(fleet.url, "/")

    def click(self, target: Locator) -> None:
        """Click, and wait until the page that follows is drawn."""
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS
        target.click()

    def follow(self, target: Locator) -> None:
        """Click on what leads to another page, and wait until that is drawn."""
        before = self.page.url
        self.click(target)
        self.page.wait_for_function("old => location.href !== old", arg=before)
        self.page.wait_for_load_state()
        if self.page.locator("script[type=module]").count():
            self.page.wait_for_selector("body[data-drawn=yes]")

    def follow_run(self, name: str) -> None:
        """Open a run of the list."""
        self.follow(self.page.get_by_role("row").get_by_role("link", name=name, exact=True))


@pytest.fixture
def reader(visit: Visit, fleet: Fleet) -> Iterator[Reader]:
    """A reader of the page of runs, on which nothing goes wrong."""
    yield Reader(visit, fleet)
    visit.assert_clean()


def row_of(reader: Reader, name: str) -> Locator:
    """Return the row of a run in the list."""
    return reader.page.get_by_role("row").filter(has=reader.page.get_by_role("link", name=name, exact=True))


def test_which_run_needs_me_now(reader: Reader, fleet: Fleet) -> None:
    runs = fleet.http.get("/v1/runs", params={"limit": 200}).json()["items"]
    critical = {run["diagnosis"]["headline"] for run in runs if run["diagnosis"]["verdict"] == "critical"}
    rows = reader.page.locator("table.runs tbody tr")
    shown = [rows.nth(place).locator(".said").inner_text() for place in range(len(critical))]
    assert set(shown) == critical
    assert reader.clicks == 0


def test_what_came_first(reader: Reader, fleet: Fleet) -> None:
    found = re.search(r"the mismatch rose first, from step (\d+)", row_of(reader, "mismatch").inner_text())
    assert found is not None
    assert 30 <= int(found[1]) <= 34, "the log-probs drift from step 30 on"
    assert "the mismatch had not risen" in row_of(reader, "learning-rate").inner_text()


def test_what_is_the_cause_and_what_to_change(reader: Reader, fleet: Fleet) -> None:
    found = fleet.get("mismatch", "diagnosis")
    reader.follow_run("mismatch")
    shown = reader.page.locator("[data-part=diagnosis]").inner_text().replace("`", "")
    cause = found["causes"][0]
    assert (cause["title"] or cause["sentence"]).replace("`", "").casefold() in shown.casefold()
    assert found["next_steps"][0].replace("`", "") in shown


def test_which_tokens_differ_most_and_is_it_normal(reader: Reader, fleet: Fleet) -> None:
    last = KINDS["mismatch"].steps
    (token,) = fleet.get("mismatch", f"steps/{last}/tokens", worst=1)["items"]
    reader.follow_run("mismatch")
    reader.follow(reader.page.locator("[data-part=head]").get_by_role("link", name=str(last), exact=True))
    worst = reader.page.get_by_role("region", name="Worst tokens").locator("tbody tr").first
    assert worst.locator("td").nth(0).inner_text() == str(token["position"])
    k3 = reader.page.get_by_role("list", name="trainer/rollout").get_by_role("listitem").first
    assert "critical" in k3.inner_text()


def test_since_when_is_it_ill(reader: Reader, fleet: Fleet) -> None:
    found = fleet.get("mismatch", "diagnosis")
    row = reader.page.get_by_role("row").filter(has=reader.page.get_by_role("link", name="mismatch", exact=True))
    assert found["headline"] in row.inner_text()
    reader.follow_run("mismatch")
    assert f"since step {found['since']}:" in reader.page.locator(".verdict strong").inner_text()
    first = min(each["step"] for each in fleet.get("mismatch", "alerts")["items"] if "mismatch" in each["rule"])
    shown = reader.page.locator(".alerts summary", has_text="mismatch").first.inner_text()
    assert f"since step {first} " in shown


def test_which_rank_is_missing(reader: Reader, fleet: Fleet) -> None:
    reader.follow_run("incomplete")
    (alert,) = [each for each in fleet.get("incomplete", "alerts")["items"] if each["rule"] == "incomplete_step"]
    (missing,) = alert["evidence"]["missing_at_newest_step"]
    assert f"(missing: shard {missing}" in reader.page.locator("[data-part=incomplete]").inner_text()
    assert "Each rank sends one shard" in reader.page.locator("[data-part=incomplete]").inner_text()


def test_which_token_was_worst_and_what_did_each_scorer_give_it(reader: Reader, fleet: Fleet) -> None:
    (token,) = fleet.get("mismatch", f"steps/{REPLAYED_STEP}/tokens", worst=1)["items"]
    reader.follow_run("mismatch")
    field = reader.page.get_by_label("Go to step")
    field.fill(str(REPLAYED_STEP))
    before = reader.page.url
    field.press("Enter")
    reader.page.wait_for_function("old => location.href !== old", arg=before)
    reader.page.wait_for_selector("body[data-drawn=yes]")
    worst = reader.page.get_by_role("region", name="Worst tokens").locator("tbody tr").first
    assert worst.get_by_role("link").inner_text() == token["sample_id"]
    reader.follow(worst.get_by_role("link"))
    panel = reader.page.locator(".rollout .token").inner_text()
    assert f"Position {token['position']}, id {token['token_id']}, d = " in panel
    assert len(token["log_probs"]) == 5
    for name, value in token["log_probs"].items():
        found = re.search(rf"{re.escape(name)}\s+−([\d.]+)", panel)
        assert found is not None, name
        assert -float(found[1]) == pytest.approx(value, rel=1e-4)


def test_how_do_these_two_runs_differ(reader: Reader, fleet: Fleet) -> None:
    reader.follow_run("mismatch")
    reader.follow(reader.page.get_by_role("link", name="Compare with learning"))
    runs = [fleet.http.get(f"/v1/runs/{fleet.ids[name]}").json() for name in ("mismatch", "learning")]
    row = reader.page.get_by_role("row").filter(has_text="hardware").locator("td").all_inner_texts()
    assert row == [run["hardware"] for run in runs]
    assert reader.page.get_by_role("row").filter(has_text="model kind").is_hidden(), "equal in both"


def test_what_did_the_trainer_do_to_its_learning_rate_and_why(reader: Reader, fleet: Fleet) -> None:
    advice = fleet.get("mismatch", "lr-advice")
    reader.follow_run("mismatch")
    panel = reader.page.locator("[data-part=advice]").inner_text()
    assert f"× {advice['advised_scale']:g}" in panel
    assert advice["reason"] in panel
    assert f"applied {advice['applied']['scale']:g} at step {advice['applied']['step']}" in panel
    control = advice["control"]
    assert f"k3 at any rate {number(control['static'])}" in panel.replace("\n", " ")
    assert advice["favours_why"]
    assert advice["favours_why"] in panel


def test_which_alerts_are_open_over_all_runs(reader: Reader, fleet: Fleet) -> None:
    reader.follow(reader.page.get_by_role("link", name="Alerts"))
    items = fleet.http.get("/v1/alerts", params={"state": "open", "limit": 200}).json()["items"]
    rows = reader.page.locator("tbody tr")
    shown = {
        (
            row.locator("th").inner_text(),
            row.locator("[data-column=Run]").inner_text(),
            row.locator("a").last.inner_text(),
        )
        for row in rows.all()
    }
    assert shown == {(each["rule"].replace("_", " "), each["run_key"], str(each["step"])) for each in items}


def test_is_the_mismatch_from_the_engine_or_from_the_lag(reader: Reader, fleet: Fleet) -> None:
    read = fleet.get("mismatch", f"steps/{REPLAYED_STEP}/attribution")
    (cause,) = [each for each in read["conclusions"] if each["names_cause"]]
    link = next(each for each in read["links"] if each["name"] == cause["link"])
    reader.follow_run("mismatch")
    causes = reader.page.locator("[data-part=diagnosis]")
    assert link["cause"].partition(":")[0] in causes.inner_text()
    reader.click(causes.get_by_text("Evidence").first)
    assert f"{100 * link['share']:.0f} %" in causes.inner_text()


def test_do_the_lengths_grow_with_the_reward(reader: Reader, fleet: Fleet) -> None:
    reader.follow_run("learning")
    label = reader.page.locator('[data-figure$="/overview.json"]').get_attribute("aria-label") or ""
    for title, measure in (("Reward", "reward_mean"), ("Response length", "response_length_mean")):
        values = fleet.measured("learning", "rollout", measure)
        lowest, highest = min(values, key=lambda step: values[step]), max(values, key=lambda step: values[step])
        ends = f"between {number(values[lowest])} (step {lowest}) and {number(values[highest])} (step {highest})"
        assert re.search(rf"{title}: \S+ at step \d+, {re.escape(ends)}", label)
        assert lowest < highest
