"""A body that cannot be read as JSON is refused with the reason and what to do."""

from __future__ import annotations

import httpx
import pytest

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def refused(http: httpx.Client, body: bytes, status: int) -> str:
    answer = http.post("/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    detail: str = answer.json()["detail"]
    return detail


@sqlite
def test_body_that_is_not_utf_8_names_its_first_byte(http: httpx.Client) -> None:
    detail = refused(http, b'{"key":\n "caf\xe9 "}', 400)
    assert detail == "the body is not UTF-8: byte 13 cannot be read; send JSON in UTF-8"


@sqlite
@pytest.mark.parametrize("opening", [b"[", b'{"[":'])
def test_body_that_is_nested_too_deep_is_refused(http: httpx.Client, opening: bytes) -> None:
    detail = refused(http, b'{"a": "[{[{",\n "b": ' + opening * 20_000, 400)
    assert detail == "the arrays and objects of the body are nested too deep; no call takes more than 16 levels"


@sqlite
@pytest.mark.parametrize("sign", [b"", b"-"])
def test_integer_with_thousands_of_digits_is_refused(http: httpx.Client, sign: bytes) -> None:
    body = b'{"key": "' + b"1" * 6_000 + b'",\n"length_cap": ' + sign + b"9" * 5_000 + b"}"
    assert refused(http, body, 400) == (
        "the body has an integer with more digits than can be read; send a number that fits its field"
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
