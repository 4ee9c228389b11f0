"""Requests for other hosts, from other sites' pages or with hidden sizes are refused; each request has an id."""

import re

import httpx
import pytest

from foreshock_service.platform.settings import Settings
from tests.service.stored import count_rows

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def test_a_host_that_is_not_allowed_is_refused(http: httpx.Client) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        answer = http.get("/v1/runs", headers={"Host": host})
        assert answer.status_code == 400, host
        if host:
            assert answer.json()["type"] == "urn:foreshock:problem:host-not-allowed"


def test_loopback_names_are_allowed(http: httpx.Client) -> None:
    for host in ("localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]:8765"):
        assert http.get("/v1/runs", headers={"Host": host}).status_code == 200, host


def test_writes_from_other_sites_pages_are_refused(http: httpx.Client, settings: Settings) -> None:
    origins = ("https://evil.example", "null", "http://[", "http://[::1")
    for headers in (*({"Origin": each} for each in origins), {"Sec-Fetch-Site": "cross-site"}):
        answer = http.post("/v1/runs", json={"key": "planted"}, headers=headers)
        assert answer.status_code == 403, headers
        assert answer.json()["type"] == "urn:foreshock:problem:cross-site-refused"
    assert count_rows(settings).get("runs") is None


def test_writes_from_the_services_own_pages_are_allowed(http: httpx.Client) -> None:
    headers = {"Origin": str(http.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert http.post("/v1/runs", json={"key": "mine"}, headers=headers).status_code == 201


def test_head_answers_as_get_does_without_the_body(http: httpx.Client) -> None:
    for path in ("/", "/livez", "/metrics", "/v1/runs", "/static/page.js", "/v1/runs/run_none", "/v1/leases"):
        wanted, answer = http.get(path), http.head(path)
        assert answer.status_code == wanted.status_code, path
        assert answer.headers["content-type"] == wanted.headers["content-type"]
        length, of_head = (int(each.headers["content-length"]) for each in (wanted, answer))
        # /metrics has figures of the service's own work, whose number of digits differs from request to request.
        assert abs(length - of_head) <= (64 if path == "/metrics" else 0)
        assert answer.content == b""
        assert http.get("/livez").status_code == 200, "the connection is still good"


def test_valid_id_is_kept_and_others_are_replaced(http: httpx.Client) -> None:
    assert http.get("/livez", headers={"X-Request-Id": "job-7.a:1"}).headers["X-Request-Id"] == "job-7.a:1"
    made = set()
    for wrong in ("", "a b", "x" * 65, "a\tb", '"><script>'):
        answer = http.get("/livez", headers={"X-Request-Id": wrong})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["X-Request-Id"])
        made.add(answer.headers["X-Request-Id"])
    assert len(made) == 5


def test_refused_host_has_the_id(http: httpx.Client) -> None:
    answer = http.get("/livez", headers={"X-Request-Id": "abc", "Host": "elsewhere"})
    assert (answer.status_code, answer.json()["request_id"]) == (400, "abc")
