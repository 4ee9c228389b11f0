"""The page of the service's own health: the numbers of `GET /v1/service`, each with its source."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from foreshock.api.records import parse
from foreshock.api.service import ServiceRecord, SpaceRecord
from foreshock_service.platform.database.opening import newest_revision
from foreshock_service.platform.keys import Scope, create_key, new_secret
from foreshock_service.present.pages.rendering import bytes_in_words, templates
from foreshock_service.present.pages.view_models import Visitor
from tests.service.present.pages.conftest import Site
from tests.service.sending import make_batch, start_run


def value_at(state: Any, source: str) -> Any:
    """Return the value that a source names."""
    for name in source.rpartition(": ")[2].split("."):
        state = state[name]
    return state


def figures_of(state: ServiceRecord) -> dict[str, tuple[str, str]]:
    """Return meaning and tone of each figure of the page by its source."""
    visitor = Visitor(signed_in=False, may_answer_alerts=True, may_operate=True, csrf_token="")
    page = templates().get_template("service.html").render(page=state, visitor=visitor)
    rows = re.findall(r'<td class="number">(.*?)</td>\s*<td>(.*?)</td>\s*<td data-column="Source"><code>(.*?)<', page)
    tones = {source: re.search(r'class="badge (\w+)"', value) for value, _, source in rows}
    found = {source: (meaning, tone[1] if (tone := tones[source]) else "") for _, meaning, source in rows}
    assert len(found) == len(rows)
    return found


def test_page_shows_every_part_of_the_service(site: Site) -> None:
    page = html.unescape(site.http.get("/service").raise_for_status().text)
    for title in ("Readiness", "Uploads", "Database", "Disk space", "Work that waits", "Background jobs"):
        assert f">{title}</h2>" in page
    assert ">ready</span>" in page
    assert f"{newest_revision()} of {newest_revision()}" in page
    assert "close waiting steps" in page
    assert 'href="/service"' in site.http.get("/").text


def test_every_figure_has_a_source_that_the_api_answers(site: Site) -> None:
    state = site.http.get("/v1/service").raise_for_status().json()
    ready = site.http.get("/readyz").raise_for_status().json()
    figures = figures_of(parse(ServiceRecord, state))
    assert len(figures) > 20
    for source, (meaning, _) in figures.items():
        value_at(ready if source.startswith("/readyz") else state, source)
        assert meaning
    parts = {source.partition(".")[0] for source in figures}
    assert {"uploads", "database", "storage", "backlog", "process", "long_polls"} <= parts


def test_uploads_are_counted(http: httpx.Client) -> None:
    sender = start_run(http)
    batch = make_batch(seed=0)
    sender.put_shard(3, batch).raise_for_status()
    sender.put_shard(3, batch).raise_for_status()
    http.put(f"/v1/runs/{sender.run}/attempts/1/clients/host-1", json={"undelivered": 7}).raise_for_status()
    state = http.get("/v1/service").raise_for_status().json()
    # The same bytes again are not stored again.
    rates = state["uploads"]["tokens_per_second"], state["uploads"]["shards_per_second"]
    assert rates[0] / rates[1] == pytest.approx(batch.response_token_ids.size)
    assert (state["backlog"]["clients"], state["backlog"]["undelivered_items"]) == (1, 7)
    assert state["backlog"]["steps_to_fold"] == 0
    sender.put_shard(4, batch, shard=0, shards=2).raise_for_status()
    assert http.get("/v1/service").json()["backlog"]["steps_to_fold"] == 1
    assert state["storage"]["database_bytes"] > 10_000


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_page_is_for_administrators(http: httpx.Client, app: FastAPI) -> None:
    def headers(scope: Scope) -> dict[str, str]:
        secret = new_secret()
        app.state.context.database.write(lambda session: create_key(session, secret, "test", None, [scope]))
        return {"Authorization": f"Bearer {secret}"}

    reader, administrator = headers(Scope.READ), headers(Scope.ADMIN)
    assert http.get("/service", headers=administrator).status_code == 200
    assert http.get("/service", headers=reader).status_code == 403
    assert 'href="/service"' not in http.get("/", headers=reader).raise_for_status().text


def test_what_is_wrong_has_a_tone(site: Site) -> None:
    state = parse(ServiceRecord, site.http.get("/v1/service").raise_for_status().json())
    assert state.storage is not None
    full = replace(state.storage, token_space=SpaceRecord(free_bytes=10**7, total_bytes=10**9))
    readiness = replace(
        state.readiness, ready=False, checks={**state.readiness.checks, "database": "failed: TimeoutError"}
    )
    uploads = replace(state.uploads, in_progress=state.uploads.places)
    figures = figures_of(replace(state, storage=full, backlog=None, readiness=readiness, uploads=uploads))
    tones = {source: tone for source, (_, tone) in figures.items() if tone}
    assert tones["storage.token_space"] == "critical"
    assert tones["backlog"] == "critical"
    assert tones["/readyz: checks.database"] == "critical"
    assert tones["uploads.in_progress"] == "warning"


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (5 * 10**12, "5 TB")])
def test_bytes_have_three_digits(size: int, text: str) -> None:
    assert bytes_in_words(size) == text


def test_page_is_described_without_an_address_of_the_machine(site: Site) -> None:
    page = site.http.get("/service").text
    assert not re.search(r"sqlite://|postgresql://|/tmp/", page)
