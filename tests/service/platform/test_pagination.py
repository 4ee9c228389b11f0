"""Cursors of lists: one that no list made is refused, whatever it holds."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from foreshock_service.platform.pagination import InvalidCursor, decode_cursor, encode_cursor


def forged(key: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def test_cursor_gives_its_key_back() -> None:
    assert decode_cursor(encode_cursor((2**63 - 1, "läuf/1")), (int, str)) == (2**63 - 1, "läuf/1")


@pytest.mark.parametrize(
    "key", [[1], [1, 2], ["1", "a"], [True, "a"], [1.5, "a"], [2**63, "a"], [1, "\ud800"], [1, "a\x00"], {"a": 1}, 7]
)
def test_forged_cursor_is_refused(key: Any) -> None:
    with pytest.raises(InvalidCursor):
        decode_cursor(forged(key), (int, str))


def test_forged_cursor_of_a_list_is_a_422(http: httpx.Client) -> None:
    for path in ("/v1/runs", "/v1/alerts", "/v1/findings", "/v1/probes"):
        # No database stores these in a text.
        for text in ("\ud800", "\x00"):
            answer = http.get(path, params={"cursor": forged([1, text])})
            assert answer.status_code == 422, path
            assert answer.json()["type"] == "urn:foreshock:problem:invalid-cursor"
