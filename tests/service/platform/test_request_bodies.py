"""Bodies of requests: no encoding, no body without a key, and answers that stay small."""

import json

import httpx
import pytest
from starlette.types import Message

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.request_guards import ReceivedBody
from foreshock_service.platform.security import Scope
from tests.service.keys import make_key
from tests.service.sending import PARQUET, start_run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def problem_of(answer: httpx.Response, status: int, name: str) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == f"urn:foreshock:problem:{name}"
    return str(answer.json()["detail"])


def test_body_with_a_content_encoding_is_refused_with_what_to_send(http: httpx.Client) -> None:
    path = f"/v1/runs/{start_run(http).run}/steps/1"
    for encoding in ("gzip", "zstd", "br", "gzip, zstd", "none"):
        for call, media_type in (("scalars", "application/json"), ("rollouts/0", PARQUET)):
            headers = {"Content-Encoding": encoding, "Content-Type": media_type}
            answer = http.put(f"{path}/{call}", content=b"\x1f\x8b" * 100_000, headers=headers)
            assert problem_of(answer, 415, "unsupported-media-type") == (
                "send the body without Content-Encoding: JSON as it is, and Parquet, which is compressed inside"
            )
    headers = {"Content-Encoding": "Identity", "Content-Type": "application/json"}
    content = json.dumps({"values": {"loss": 0.5}}).encode()
    assert http.put(f"{path}/scalars", content=content, headers=headers).status_code == 204


@pytest.mark.parametrize("secret", [None, "fsk_wrong"])
def test_body_without_a_valid_key_is_not_read(
    http: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    make_key(database, Scope.ADMIN)

    async def read(self: object) -> Message:
        raise AssertionError("the body was read")

    monkeypatch.setattr(ReceivedBody, "receive", read)
    headers = {"Content-Type": "application/json"}
    headers |= {} if secret is None else {"Authorization": f"Bearer {secret}"}
    for method, path in (("POST", "/v1/runs"), ("PUT", "/v1/runs/r/steps/1/scalars"), ("POST", "/v1/nothing")):
        answer = http.request(method, path, content=b"[" * 100_000, headers=headers)
        problem_of(answer, 401, "authentication-required")


def test_form_of_a_page_has_a_cap_of_its_own(http: httpx.Client) -> None:
    answer = http.post("/login", data={"api_key": "a" * 100_000})
    assert "65,536" in problem_of(answer, 413, "limit-exceeded")


def test_problem_of_many_faults_shows_the_first_and_the_count(http: httpx.Client) -> None:
    path = f"/v1/runs/{start_run(http, 'run').run}/steps/1/scalars"
    answer = http.put(path, json={"values": {f"name-{number}": "text" for number in range(900)}})
    assert problem_of(answer, 422, "invalid-request").endswith("; and 880 more")
    assert len(answer.json()["errors"]) == 20
    answer = http.put(path, json={"values": {f"name-{number}": "text" for number in range(5_000)}})
    assert "at most 1,000 values, got 5,000" in problem_of(answer, 422, "invalid-request")


def test_problem_of_a_long_parameter_is_short(http: httpx.Client) -> None:
    for query in ("a" * 30_000 + "=1", "&".join(f"name{number}=1" for number in range(4_000))):
        answer = http.get(f"/v1/runs?{query}")
        problem_of(answer, 422, "invalid-request")
        assert len(answer.content) < 12_000


def refused(http: httpx.Client, body: bytes, status: int) -> str:
    answer = http.post("/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    detail: str = answer.json()["detail"]
    return detail


def test_body_that_is_not_utf_8_names_its_first_byte(http: httpx.Client) -> None:
    detail = refused(http, b'{"key":\n "caf\xe9 "}', 400)
    assert detail == "the body is not UTF-8: byte 13 cannot be read; send JSON in UTF-8"


@pytest.mark.parametrize("opening", [b"[", b'{"[":'])
def test_body_that_is_nested_too_deep_is_refused(http: httpx.Client, opening: bytes) -> None:
    detail = refused(http, b'{"a": "[{[{",\n "b": ' + opening * 20_000, 400)
    assert detail == "the arrays and objects of the body are nested too deep; no call takes more than 16 levels"


@pytest.mark.parametrize("sign", [b"", b"-"])
def test_integer_with_thousands_of_digits_is_refused(http: httpx.Client, sign: bytes) -> None:
    body = b'{"key": "' + b"1" * 6_000 + b'",\n"length_cap": ' + sign + b"9" * 5_000 + b"}"
    assert refused(http, body, 400) == (
        "the body has an integer with more digits than can be read; send a number that fits its field"
    )


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"key": "x"\n "model": "m"}', "body: not valid JSON at line 2, column 2: Expecting ',' delimiter"),
        (b'{"key":', "body: not valid JSON at line 1, column 8, the end of the body: Expecting value"),
    ],
)
def test_broken_syntax_names_line_column_and_what_was_expected(http: httpx.Client, body: bytes, fault: str) -> None:
    assert refused(http, body, 422) == fault
