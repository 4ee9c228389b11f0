"""Runs: get or create, page through them, change them, delete them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx


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
