"""Runs: get or create, page through them, change them, delete them."""

from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
from sqlalchemy import update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.security import Scope
from foreshock_service.runs.runs import lock_run_for_background
from tests.service.keys import make_key
from tests.service.sending import Sender, make_batch, problem_of, start_run


def test_same_key_returns_same_run(http: httpx.Client) -> None:
    body = {"key": "nightly", "model": "Qwen3-4B", "initial_learning_rate": 1e-6, "length_cap": 8192}
    first, again = http.post("/v1/runs", json=body), http.post("/v1/runs", json=body | {"model": "another"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert first.json()["model"] == "Qwen3-4B"
    assert first.json()["advice_mode"] == "shadow"
    elsewhere = http.post("/v1/runs", json=body | {"project": "another"})
    assert elsewhere.status_code == 201
    assert elsewhere.json()["id"] != first.json()["id"]


def test_concurrent_requests_with_same_key_create_one_run(http: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: http.post("/v1/runs", json={"key": "k"}), range(16)))
    assert sorted(answer.status_code for answer in answers) == [200] * 15 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1


def test_pages_list_each_run_once_while_runs_are_added(http: httpx.Client) -> None:
    made = [http.post("/v1/runs", json={"key": f"run {number}"}).json()["id"] for number in range(7)]
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = http.get("/v1/runs", params={"limit": 3, **cursor}).json()
        seen += [run["id"] for run in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
        http.post("/v1/runs", json={"key": f"added {len(seen)}"})
    assert seen == made[::-1]


def test_update_changes_only_given_fields(http: httpx.Client) -> None:
    run = http.post("/v1/runs", json={"key": "k", "name": "before"}).json()
    changed = http.patch(f"/v1/runs/{run['id']}", json={"state": "finished"}).json()
    assert (changed["state"], changed["name"]) == ("finished", "before")
    assert changed["updated_at_us"] >= run["updated_at_us"]
    assert http.patch(f"/v1/runs/{run['id']}", json={"name": None}).json()["name"] is None


def test_runs_are_filtered_by_model_kind_state_and_a_part_of_their_name(http: httpx.Client) -> None:
    http.post("/v1/runs", json={"key": "one", "model": "Qwen3-4B", "name": "50%_off"}).raise_for_status()
    body = {"key": "two", "model": "Qwen3-30B-A3B", "model_kind": "moe", "project": "team"}
    second = http.post("/v1/runs", json=body).raise_for_status().json()
    http.patch(f"/v1/runs/{second['id']}", json={"state": "finished"}).raise_for_status()

    def keys(**query: object) -> list[str]:
        found = http.get("/v1/runs", params=query).raise_for_status().json()["items"]  # type: ignore[arg-type]
        return [run["key"] for run in found]

    assert keys(model="Qwen3-4B") == ["one"]
    assert keys(model_kind="moe") == ["two"]
    assert keys(state="finished") == ["two"]
    assert keys(state=["finished", "running"]) == ["two", "one"]
    assert keys(search="TW") == ["two"]
    assert keys(search="%_O") == ["one"]
    assert keys(search="%") == ["one"]
    assert keys(project="team", search="one") == []
    assert http.get("/v1/runs", params={"state": "asleep"}).status_code == 422


def test_a_run_that_was_read_before_is_refreshed_by_its_lock(database: Database) -> None:
    made = Run(
        id="run_a", project="team", key="nightly", name="first", advice_mode="shadow", state="running",
        created_at_us=1, updated_at_us=1,
    )  # fmt: skip
    database.write(lambda session: session.add(made))

    def lock_after_reading(session: Session) -> tuple[bool, str | None]:
        before = session.get(Run, "run_a")
        session.connection().execute(update(Run).values(name="changed below the session"))
        run = lock_run_for_background(session, "run_a")
        assert run is not None
        return run is before, run.name

    assert database.write(lock_after_reading) == (True, "changed below the session")
    assert database.write(lambda session: lock_run_for_background(session, "run_b")) is None


GOOD = {"root": "weights", "path": "run/step_20", "digest": "sha256:" + "0" * 64}


def test_new_announcement_overwrites_checkpoint(http: httpx.Client) -> None:
    run = start_run(http).run
    first = http.put(f"/v1/runs/{run}/checkpoints/20", json=GOOD)
    assert first.status_code == 201
    again = http.put(f"/v1/runs/{run}/checkpoints/20", json=GOOD | {"expires_at_us": 5, "weights_version": 20})
    assert again.status_code == 200
    http.put(f"/v1/runs/{run}/checkpoints/3", json=GOOD).raise_for_status()
    page = http.get(f"/v1/runs/{run}/checkpoints", params={"limit": 1}).json()
    assert [each["step"] for each in page["items"]] == [3]
    rest = http.get(f"/v1/runs/{run}/checkpoints", params={"cursor": page["next_cursor"]}).json()
    (newest,) = rest["items"]
    assert newest == again.json()
    assert (newest["expires_at_us"], newest["format"], newest["attempt"]) == (5, "hf_safetensors", 1)


KEYS = ("nightly", "team/run 7", "100%", "a%2Fb", "größe", "r?x=1#y", "run_1")


def new_run(http: httpx.Client, key: str, project: str = "default") -> str:
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
    assert problem_of(answer) == (409, "run-key-ambiguous")
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
