"""Compressed request bodies: they are what they are decompressed, under the same caps, and their memory is flat."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys import Scope, create_key, new_secret
from foreshock_service.platform.problem import BodyRefused
from foreshock_service.platform.request_guards import DecompressedBody
from foreshock_service.platform.settings import Settings
from tests.service.sending import PARQUET, make_batch, start_run
from tests.service.stored import count_rows, list_files

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "zstd": zstd.compress,
    "ZSTD": zstd.compress,
    "identity": bytes,
}
both = pytest.mark.parametrize("encoding", ["gzip", "zstd"])


def problem_of(answer: httpx.Response, status: int, name: str) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == f"urn:foreshock:problem:{name}"
    return str(answer.json()["detail"])


@sqlite
@pytest.mark.parametrize("encoding", ENCODERS)
def test_json_and_tables_are_stored_as_they_are_decompressed(http: httpx.Client, encoding: str) -> None:
    sender = start_run(http, f"run-{encoding}")
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    scalars = json.dumps({"values": {"loss": 0.5}}).encode()
    path = f"/v1/runs/{sender.run}/steps/1/scalars"
    answer = http.put(
        path, content=ENCODERS[encoding](scalars), headers={**headers, "Content-Type": "application/json"}
    )
    assert answer.status_code == 204, answer.text
    assert sender.get("scalars").json()["columns"]["value"] == [0.5]
    shard = encode_rollouts(make_batch())
    path = f"/v1/runs/{sender.run}/steps/1/rollouts/0"
    answer = http.put(path, content=ENCODERS[encoding](shard), headers={**headers, "Content-Type": PARQUET})
    assert answer.status_code == 201, answer.text
    # The digest is that of the decompressed bytes: the same shard without an encoding is the same shard.
    assert sender.put_shard(1, shard).status_code == 200


@sqlite
@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd", "none"])
def test_other_encodings_are_refused_with_those_that_are_accepted(http: httpx.Client, encoding: str) -> None:
    answer = http.post("/v1/runs", content=b"{}", headers={"Content-Encoding": encoding})
    assert "gzip, zstd or none" in problem_of(answer, 415, "unsupported-media-type")
    assert answer.headers["accept-encoding"] == "gzip, zstd"


@sqlite
@both
@pytest.mark.parametrize("damage", ["garbage", "cut", "trailing garbage"])
def test_damaged_body_is_a_problem_and_nothing_is_stored(
    http: httpx.Client, settings: Settings, encoding: str, damage: str
) -> None:
    sender = start_run(http)
    body = ENCODERS[encoding](encode_rollouts(make_batch()))
    body = {"garbage": b"no " + body, "cut": body[:-10], "trailing garbage": body + b"more than nothing"}[damage]
    headers = {"Content-Encoding": encoding, "Content-Type": PARQUET}
    answer = http.put(f"/v1/runs/{sender.run}/steps/1/rollouts/0", content=body, headers=headers)
    problem_of(answer, 400, "invalid-body-encoding")
    headers["Content-Type"] = "application/json"
    answer = http.put(f"/v1/runs/{sender.run}/steps/1/scalars", content=body, headers=headers)
    problem_of(answer, 400, "invalid-body-encoding")
    assert list_files(settings) == []
    assert "steps" not in count_rows(settings)


@sqlite
@both
def test_bomb_is_refused_at_the_cap_of_its_kind(http: httpx.Client, settings: Settings, encoding: str) -> None:
    sender = start_run(http)
    bomb = ENCODERS[encoding](bytes(100 * settings.max_body_bytes))
    assert len(bomb) < settings.max_json_bytes
    headers = {"Content-Encoding": encoding, "Content-Type": PARQUET}
    answer = http.put(f"/v1/runs/{sender.run}/steps/1/rollouts/0", content=bomb, headers=headers)
    detail = problem_of(answer, 413, "limit-exceeded")
    assert f"{settings.max_body_bytes:,} bytes allowed, decompressed" in detail
    headers["Content-Type"] = "application/json"
    answer = http.put(f"/v1/runs/{sender.run}/steps/1/scalars", content=bomb, headers=headers)
    assert f"{settings.max_json_bytes:,} bytes allowed, decompressed" in problem_of(answer, 413, "limit-exceeded")
    assert list_files(settings) == []


def received_in(pieces: list[bytes]) -> Callable[[], Any]:
    """Return an ASGI `receive` of a body in these pieces."""
    left: Iterator[tuple[int, bytes]] = iter(enumerate(pieces, 1))

    async def receive() -> Message:
        number, piece = next(left)
        return {"type": "http.request", "body": piece, "more_body": number < len(pieces)}

    return receive


def read_all(body: DecompressedBody) -> list[bytes]:
    async def read() -> list[bytes]:
        pieces: list[bytes] = []
        while True:
            message = await body.receive()
            pieces.append(message["body"])
            if not message["more_body"]:
                return pieces

    return asyncio.run(read())


@both
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_members_may_follow_each_other_in_pieces_of_any_size(encoding: str, size: int) -> None:
    compress = ENCODERS[encoding]
    whole = compress(b"first ") + compress(b"") + compress(b"second " * 100)
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    body = DecompressedBody(received_in(pieces), encoding, 10_000)
    assert b"".join(read_all(body)) == b"first " + b"second " * 100
    assert body.received == 706


@both
def test_empty_body_is_empty(encoding: str) -> None:
    assert read_all(DecompressedBody(received_in([b""]), encoding, 10)) == [b""]


@both
def test_body_of_exactly_the_cap_is_taken_and_one_byte_more_is_not(encoding: str) -> None:
    exact = ENCODERS[encoding](bytes(1_000_000))
    assert len(b"".join(read_all(DecompressedBody(received_in([exact]), encoding, 1_000_000)))) == 1_000_000
    with pytest.raises(BodyRefused) as refused:
        read_all(DecompressedBody(received_in([exact]), encoding, 999_999))
    assert refused.value.status_code == 413


@both
def test_memory_of_a_bomb_is_that_of_some_pieces(encoding: str) -> None:
    bomb = ENCODERS[encoding](bytes(200_000_000))

    async def read() -> int:
        body = DecompressedBody(received_in([bomb]), encoding, 10**12)
        while (await body.receive())["more_body"]:
            pass
        return body.received

    tracemalloc.start()
    try:
        assert asyncio.run(read()) == 200_000_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


def test_frame_with_a_huge_window_is_refused_before_it_is_allocated() -> None:
    options: dict[int, int] = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    frame = compressor.compress(bytes(1000)) + compressor.flush()
    with pytest.raises(BodyRefused, match="memory") as refused:
        read_all(DecompressedBody(received_in([frame]), "zstd", 10_000))
    assert refused.value.problem.problem_type == "invalid-body-encoding"


@both
def test_body_of_more_members_than_the_cap_is_refused_before_it_is_read_to_its_end(encoding: str) -> None:
    body = DecompressedBody(received_in([ENCODERS[encoding](b"")] * 100_000), encoding, 10_000)
    with pytest.raises(BodyRefused) as refused:
        read_all(body)
    assert refused.value.status_code == 413
    assert "more than 1,000" in refused.value.detail


@sqlite
@pytest.mark.parametrize("secret", [None, "fsk_wrong"])
@pytest.mark.parametrize("content", [zstd.compress(b"") * 1_000, b"[" * 100_000, b"no zstd"], ids=["frames", "", "bad"])
def test_body_without_a_valid_key_is_not_read(
    http: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch, secret: str | None, content: bytes
) -> None:
    database.write(lambda session: create_key(session, new_secret(), "a key", None, [Scope.ADMIN]))

    async def read(self: object) -> Message:
        raise AssertionError("the body was read")

    monkeypatch.setattr(DecompressedBody, "receive", read)
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}
    headers |= {} if secret is None else {"Authorization": f"Bearer {secret}"}
    for method, path in (("POST", "/v1/runs"), ("PUT", "/v1/runs/r/steps/1/scalars"), ("POST", "/v1/nothing")):
        answer = http.request(method, path, content=content, headers=headers)
        problem_of(answer, 401, "authentication-required")


@sqlite
def test_form_of_a_page_has_a_cap_of_its_own(http: httpx.Client) -> None:
    answer = http.post("/login", data={"api_key": "a" * 100_000})
    assert "65,536" in problem_of(answer, 413, "limit-exceeded")


@sqlite
def test_problem_of_many_faults_shows_the_first_and_the_count(http: httpx.Client) -> None:
    path = f"/v1/runs/{start_run(http, 'run').run}/steps/1/scalars"
    answer = http.put(path, json={"values": {f"name-{number}": "text" for number in range(900)}})
    assert problem_of(answer, 422, "invalid-request").endswith("; and 880 more")
    assert len(answer.json()["errors"]) == 20
    answer = http.put(path, json={"values": {f"name-{number}": "text" for number in range(5_000)}})
    assert "at most 1,000 values, got 5,000" in problem_of(answer, 422, "invalid-request")


@sqlite
def test_problem_of_a_long_parameter_is_short(http: httpx.Client) -> None:
    for query in ("a" * 30_000 + "=1", "&".join(f"name{number}=1" for number in range(4_000))):
        answer = http.get(f"/v1/runs?{query}")
        problem_of(answer, 422, "invalid-request")
        assert len(answer.content) < 12_000
