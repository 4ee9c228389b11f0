"""Keys as addresses of runs: in the API and of pages, also if two projects use the same key."""

from __future__ import annotations

from urllib.parse import quote

import httpx

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys import Scope
from tests.service.keys import make_key
from tests.service.sending import Sender, make_batch, start_run

KEYS = ("nightly", "team/run 7", "100%", "a%2Fb", "größe", "r?x=1#y", "run_1")


def new_run(http: httpx.Client, key: str, project: str = "default") -> str:
    """Return the id of a new run."""
    return str(http.post("/v1/runs", json={"key": key, "project": project}).raise_for_status().json()["id"])


def test_key_works_where_an_id_does(http: httpx.Client) -> None:
    for key in KEYS:
        run = new_run(http, key)
        path = quote(key, safe="")
        assert http.get(f"/v1/runs/{path}").raise_for_status().json()["id"] == run
        sender = Sender(http, path, http.post(f"/v1/runs/{path}/attempts", json={"key": "first"}).json()["attempt"])
        sender.put_shard(3, make_batch()).raise_for_status()
        assert sender.get("steps").json()["items"][0]["step"] == 3
        assert sender.get("measurements").raise_for_status().json()["columns"]["step"] == [3, 3]
        for page in (f"/runs/default/{path}", f"/runs/{path}", f"/runs/{run}"):
            shown = http.get(page).raise_for_status().text
            assert f'href="/runs/default/{path}/steps/3"' in shown
            http.get(f"{page}/steps/3").raise_for_status()
        assert f'href="/runs/default/{path}"' in http.get("/").text


def test_key_of_the_form_of_an_id_is_refused(http: httpx.Client) -> None:
    body = {"key": new_run(http, "first")}
    refused = http.post("/v1/runs", json=body)
    assert refused.status_code == 422
    assert "has the form of an id that the service gives to runs: choose another key" in refused.json()["detail"]
    assert new_run(http, "run_of_monday")


def test_two_projects_with_one_key_need_the_project(http: httpx.Client) -> None:
    first, second = new_run(http, "nightly", "a"), new_run(http, "nightly", "b")
    answer = http.get("/v1/runs/nightly/steps")
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:foreshock:problem:run-key-ambiguous"
    assert "a, b" in answer.json()["detail"]
    for project, run in (("a", first), ("b", second)):
        assert http.get("/v1/runs/nightly", params={"project": project}).json()["id"] == run
        assert f"/pages/runs/{run}/" in http.get(f"/runs/{project}/nightly").raise_for_status().text
    assert http.get("/runs/nightly").status_code == 409
    http.delete(f"/v1/runs/{first}").raise_for_status()
    assert http.get("/v1/runs/nightly").json()["id"] == second
    assert http.get("/v1/runs/nightly", params={"project": "a"}).status_code == 410


def test_bound_key_sees_no_run_of_another_project(http: httpx.Client, database: Database) -> None:
    own, foreign = new_run(http, "nightly", "a"), new_run(http, "nightly", "b")
    new_run(http, "secret", "b")
    _, headers = make_key(database, Scope.READ, Scope.INGEST, project="a")
    assert http.get("/v1/runs/nightly", headers=headers).json()["id"] == own
    missing = http.get("/v1/runs/nowhere", headers=headers)
    for path in ("/v1/runs/secret", "/v1/runs/secret?project=b", "/v1/runs/nowhere?project=b", "/runs/b/secret"):
        hidden = http.get(path, headers=headers)
        assert hidden.status_code == missing.status_code == 404, path
        if path.startswith("/v1"):
            assert hidden.json()["detail"].replace("secret", "nowhere") == missing.json()["detail"]
    for path in ("/v1/runs/nightly?project=b", f"/v1/runs/{foreign}", "/runs/b/nightly", f"/runs/{foreign}"):
        assert http.get(path, headers=headers).status_code == 404, path
    write = http.patch("/v1/runs/secret", json={"name": "mine"}, headers=headers)
    assert write.status_code == 404
    listed = http.get("/v1/runs", params={"key": "nightly"}, headers=headers).json()["items"]
    assert [run["id"] for run in listed] == [own]
    assert http.get("/v1/runs", params={"key": "secret"}, headers=headers).json()["items"] == []


def test_address_by_key_needs_an_api_key(http: httpx.Client, database: Database) -> None:
    new_run(http, "nightly")
    make_key(database, Scope.READ)
    assert http.get("/v1/runs/nightly").status_code == http.get("/v1/runs/nowhere").status_code == 401
    page = http.get("/runs/default/nightly")
    assert (page.status_code, page.headers["location"]) == (303, "/login?next=/runs/default/nightly")


def test_runs_are_found_by_key(http: httpx.Client) -> None:
    new_run(http, "other")
    runs = [new_run(http, "nightly", project) for project in ("a", "b")]
    found = http.get("/v1/runs", params={"key": "nightly"}).json()["items"]
    assert [run["id"] for run in found] == runs[::-1]
    assert [run["id"] for run in http.get("/v1/runs?key=nightly&project=a").json()["items"]] == runs[:1]
    assert http.get("/v1/runs?key=night").json()["items"] == []


def test_forms_of_a_page_lead_back_to_its_address(http: httpx.Client) -> None:
    run = start_run(http, "team/nightly").run
    Sender(http, run).put_shard(1, make_batch()).raise_for_status()
    page = http.get("/runs/default/team%2Fnightly").text
    token = page.partition('name="csrf_token" value="')[2].partition('"')[0]
    answer = http.post(f"/runs/{run}/advice", data={"kind": "hold", "reason": "a test", "csrf_token": token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/default/team%2Fnightly")
