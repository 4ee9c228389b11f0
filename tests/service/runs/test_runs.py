"""Runs: get or create, page through them, change them, delete them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
from sqlalchemy import update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Run
from foreshock_service.runs.runs import lock_run_for_background
from tests.service.sending import start_run


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
    assert http.patch(f"/v1/runs/{run['id']}", json={"state": "paused"}).status_code == 422
    assert http.patch(f"/v1/runs/{run['id']}", json={"key": "other"}).status_code == 422


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


def add_run(session: Session) -> None:
    """Add a run with names of its scalars."""
    session.add(
        Run(
            id="run_a",
            project="team",
            key="nightly",
            name="first",
            advice_mode="shadow",
            state="running",
            scalar_names={"reward": "score"},
            created_at_us=1,
            updated_at_us=1,
        )
    )


def test_a_run_that_was_read_before_is_refreshed_by_its_lock(database: Database) -> None:
    database.write(add_run)

    def lock_after_reading(session: Session) -> tuple[bool, str | None]:
        before = session.get(Run, "run_a")
        session.connection().execute(update(Run).values(name="changed below the session"))
        run = lock_run_for_background(session, "run_a")
        assert run is not None
        return run is before, run.name

    assert database.write(lock_after_reading) == (True, "changed below the session")


def test_there_is_nothing_to_lock_without_the_run(database: Database) -> None:
    assert database.write(lambda session: lock_run_for_background(session, "run_a")) is None


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
