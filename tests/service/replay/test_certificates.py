"""Certificates in a service: stored once, listed, returned as they were made, and refused if they are none."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock.api.records import to_json
from foreshock.certify.certificate import Certificate, read_certificate, write_certificate
from foreshock.errors import ForeshockError
from foreshock_probes.certify import command
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import Scope
from tests.foreshock.certify.making import certificate, not_tried, row
from tests.foreshock.certify.test_registry import made
from tests.ports import free_port
from tests.service.keys import make_key

WHOLE = replace(
    certificate(row("prefill", 0.01), row("sampling", 0.03), not_tried("sleep", "the engine cannot sleep")),
    token_sets={"sha256:0": "AAAA"},
    fingerprints=made().fingerprints,
)


def post(http: httpx.Client, body: Any, **query: str) -> httpx.Response:
    return http.post("/v1/certificates", json=body, params=query)


def test_certificate_is_stored_once_and_returned_as_it_was_made(http: httpx.Client, tmp_path: Path) -> None:
    first, again = post(http, to_json(WHOLE)), post(http, to_json(WHOLE))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert first.json()["engine"] == "vllm 0.32.0 bfloat16"
    assert first.json()["verdicts"] == {"prefill": "rounding", "sampling": "different", "sleep": "not tried"}
    answer = http.get(f"/v1/certificates/{first.json()['id']}").raise_for_status()
    file = tmp_path / "certificate.json"
    file.write_bytes(answer.content)
    assert to_json(read_certificate(file)) == to_json(WHOLE)


def test_list_has_the_newest_first_page_by_page(http: httpx.Client) -> None:
    for model in ("a", "b", "c"):
        post(http, to_json(replace(WHOLE, model=model))).raise_for_status()
    page = http.get("/v1/certificates", params={"limit": 2}).raise_for_status().json()
    assert [each["model"] for each in page["items"]] == ["c", "b"]
    rest = http.get("/v1/certificates", params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert [each["model"] for each in rest["items"]] == ["a"]
    assert http.get("/v1/certificates", params={"project": "other"}).json()["items"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 2"),
        ({"rows": "none"}, "rows"),
        ({"trainer": "t" * 20_000}, "too long to be listed"),
        ({"model_digest": None}, "model_digest"),
        ({"fingerprints": {"vllm.decode": {"dtype": "bfloat16"}}}, "engine"),
    ],
)
def test_body_that_is_no_certificate_of_this_schema_is_refused(
    http: httpx.Client, change: dict[str, Any], words: str
) -> None:
    answer = post(http, to_json(WHOLE) | change)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert words in answer.json()["detail"]
    assert http.get("/v1/certificates").json()["items"] == []


def test_other_bodies_and_ids_are_problems(http: httpx.Client) -> None:
    assert http.post("/v1/certificates", content=b"{", headers={"Content-Type": "application/json"}).status_code == 422
    assert post(http, []).status_code == 422
    assert post(http, to_json(replace(WHOLE, token_sets={"sha256:0": "A" * (2 << 20)}))).status_code == 413
    missing = http.get("/v1/certificates/cert_none")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:foreshock:problem:certificate-not-found")


def test_text_that_no_database_column_holds_is_kept(http: httpx.Client) -> None:
    odd = replace(WHOLE, model="a\x00b<script>", made_at="")
    found = post(http, to_json(odd)).raise_for_status().json()
    assert http.get(f"/v1/certificates/{found['id']}").json()["model"] == odd.model
    assert "<script>" not in http.get(f"/certificates/{found['id']}").raise_for_status().text.split("</head>")[1]


def test_key_of_a_project_sees_only_its_certificates(http: httpx.Client, database: Database) -> None:
    _, own = make_key(database, Scope.INGEST, project="own")
    _, other = make_key(database, Scope.INGEST, Scope.READ, project="other")
    _, reader = make_key(database, Scope.READ, project="own")
    body, query = to_json(WHOLE), {"project": "own"}
    answer = http.post("/v1/certificates", json=body, params=query, headers=own)
    assert answer.status_code == 201
    path = f"/v1/certificates/{answer.json()['id']}"
    assert http.get(path, headers=reader).status_code == 200
    assert http.get(path, headers=other).status_code == 404
    assert http.get("/v1/certificates", headers=other).json()["items"] == []
    assert http.post("/v1/certificates", json=body, params=query, headers=other).status_code == 403
    assert http.post("/v1/certificates", json=body, headers=reader).status_code == 403


def test_administrator_of_the_project_deletes_a_certificate(http: httpx.Client, database: Database) -> None:
    found = post(http, to_json(WHOLE), project="own").json()
    path = f"/v1/certificates/{found['id']}"
    for scope, project, status in ((Scope.INGEST, "own", 403), (Scope.ADMIN, "other", 404), (Scope.ADMIN, "own", 204)):
        _, headers = make_key(database, Scope.READ, scope, project=project)
        assert http.delete(path, headers=headers).status_code == status
    assert http.delete(path, headers=headers).status_code == 404
    assert http.get(path, headers=headers).status_code == 404
    assert http.get("/v1/certificates", headers=headers).json()["items"] == []
    _, sender = make_key(database, Scope.INGEST, project="own")
    again = http.post("/v1/certificates", json=to_json(WHOLE), params={"project": "own"}, headers=sender)
    assert (again.status_code, again.json()["verdicts"]) == (201, found["verdicts"])


def test_pages_show_the_matrix_one_and_two_compared(http: httpx.Client) -> None:
    assert "No certificate is stored yet" in http.get("/certificates").raise_for_status().text
    worse = replace(WHOLE, rows=(row("prefill", 0.5, seed=2), *WHOLE.rows[1:]), made_at="2026-11-30T12:00:00Z")
    old, new = (post(http, to_json(each)).raise_for_status().json()["id"] for each in (WHOLE, worse))
    matrix = http.get("/certificates").raise_for_status().text
    assert matrix.count(">not tried<") == 2
    assert f'href="/certificates/{old}"' in matrix
    page = http.get(f"/certificates/{new}").raise_for_status().text
    assert "the engine cannot sleep" in page
    assert f'href="/certificates/{new}?against={old}"' in page
    compared = http.get(f"/certificates/{new}", params={"against": old}).raise_for_status().text
    assert "worse: prefill: rounding before, different now" in compared
    stranger = post(http, to_json(replace(WHOLE, model_digest="sha256:" + "b" * 64))).json()["id"]
    assert "cannot be compared" in http.get(f"/certificates/{new}", params={"against": stranger}).text
    assert http.get("/certificates/cert_none").status_code == 404


def test_command_sends_its_certificate(
    http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`certify MODEL --url` sends what it made; `show` sends nothing."""

    def certified(arguments: argparse.Namespace, other: Certificate | None) -> Certificate:
        return WHOLE

    monkeypatch.setattr(command, "_certified", certified)
    monkeypatch.setenv("FORESHOCK_URL", str(http.base_url))
    parser = argparse.ArgumentParser()
    command.certify.configure(parser)
    file = tmp_path / "certificate.json"
    write_certificate(file, WHOLE)
    assert command.certify.run(parser.parse_args(["show", str(file)])) == 1
    assert http.get("/v1/certificates").json()["items"] == []
    assert command.certify.run(parser.parse_args(["model", "--project", "mine"])) == 1
    (stored,) = http.get("/v1/certificates", params={"project": "mine"}).json()["items"]
    assert json.loads(http.get(f"/v1/certificates/{stored['id']}").content) == to_json(WHOLE)
    capsys.readouterr()
    # A service of the environment that is away takes nothing from the result; one that was asked for does.
    away = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("FORESHOCK_URL", away)
    assert command.certify.run(parser.parse_args(["model"])) == 1
    assert capsys.readouterr().err.startswith(f"the certificate was not sent: no answer from {away}")
    with pytest.raises(ForeshockError, match="no answer"):
        command.certify.run(parser.parse_args(["model", "--url", away]))
