"""A body that cannot be read as JSON is refused with the reason, the place and what to do."""

from __future__ import annotations

import time

import httpx
import pytest

from foreshock_service.platform.json_bodies import fault_of
from tests.service.sending import start_run

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def refused(http: httpx.Client, body: bytes, status: int) -> str:
    answer = http.post("/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    detail: str = answer.json()["detail"]
    return detail


@sqlite
def test_body_that_is_not_utf_8_names_its_first_byte(http: httpx.Client) -> None:
    detail = refused(http, b'{"key":\n "caf\xe9 "}', 400)
    assert detail == "the body is not UTF-8: 0xe9 at byte 13 (line 2); send JSON in UTF-8"


@sqlite
@pytest.mark.parametrize(("opening", "level"), [(b"[", 1), (b'{"[":', 5)])
def test_body_that_is_nested_too_deep_names_the_place(http: httpx.Client, opening: bytes, level: int) -> None:
    detail = refused(http, b'{"a": "[{[{",\n "b": ' + opening * 20_000, 400)
    # The outer object is the first level.
    position = len(b'{"a": "[{[{",\n "b": ') + 99 * level
    assert detail == (
        f"the arrays and objects of the body are nested more than 100 deep, from byte {position:,} (line 2) on; "
        "check what encodes the body: no call takes so many levels"
    )


@sqlite
@pytest.mark.parametrize("sign", [b"", b"-"])
def test_integer_with_thousands_of_digits_is_located(http: httpx.Client, sign: bytes) -> None:
    body = b'{"key": "' + b"1" * 6_000 + b'",\n"length_cap": ' + sign + b"9" * 5_000 + b"}"
    place = body.index(b"cap") + 6
    assert refused(http, body, 400) == (
        f"the integer at byte {place:,} (line 2) has 5,000 digits, more than the 4,300 that can be read; "
        "send a number that fits its field"
    )


@sqlite
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"key": "x"\n "model": "m"}', "body: not valid JSON at line 2, column 2: Expecting ',' delimiter"),
        (b'{"key":', "body: not valid JSON at line 1, column 8, the end of the body: Expecting value"),
    ],
)
def test_broken_syntax_names_line_column_and_what_was_expected(http: httpx.Client, body: bytes, fault: str) -> None:
    assert refused(http, body, 422) == fault


@sqlite
def test_other_calls_say_it_too(http: httpx.Client) -> None:
    run = start_run(http).run
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = http.patch(f"/v1/runs/{run}", content=b'{"name": "\xff"}', headers=headers)
    assert "0xff at byte 10" in answer.json()["detail"]


def test_search_takes_time_in_proportion_to_the_body() -> None:
    body = b'"' + b'\\"' * 1_000_000
    begin = time.monotonic()
    assert fault_of(RecursionError(), body) is not None
    assert fault_of(ValueError(), body) is None
    assert time.monotonic() - begin < 5
