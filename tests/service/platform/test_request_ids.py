"""A request's id: the caller's if it is valid, else a new one; in the answer, in problems."""

from __future__ import annotations

import re

import httpx
import pytest

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


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
