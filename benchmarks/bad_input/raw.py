"""Requests as bytes: what is no HTTP, headers without a bound, and lengths that do not fit."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.bad_input.answers import Tally, is_known

# An answer that does not come within so long is missing; nothing waits for the rest of an unfinished request.
_ANSWER_SECONDS, _UNFINISHED_SECONDS = 60.0, 0.2
_MOST_BYTES = 1 << 20
_CRLF = b"\r\n"


@dataclass(frozen=True, slots=True)
class RawRequest:
    """Bytes of a request. `is_whole`: the service must answer it; `repeated` is sent until it closes the connection."""

    kind: str
    sent: bytes
    is_whole: bool = True
    repeated: bytes = b""


def send_raw(url: str, count: int, seed: int, threads: int = 4) -> Tally:
    """Send `count` hostile requests, each on a connection of its own; the same seed gives the same bytes."""
    parts = urlsplit(url)
    address = (str(parts.hostname), int(parts.port or 0))
    tally = Tally()

    def send(number: int) -> tuple[RawRequest, http.client.HTTPResponse | None, bytes, str]:
        request = raw_request(random.Random(f"{seed}/{number}"), f"{address[0]}:{address[1]}".encode())
        return request, *_answer(address, request), f"seed {seed}, number {number}, {request.sent[:120]!r}"

    with ThreadPoolExecutor(threads) as pool:
        for request, answer, body, example in pool.map(send, range(count)):
            _judge(tally, request, answer, body, example)
    return tally


def _judge(
    tally: Tally, request: RawRequest, answer: http.client.HTTPResponse | None, body: bytes, example: str
) -> None:
    tally.requests += 1
    if answer is None:
        tally.statuses[0] += 1
        # The server closes the connection of a request that has no end; its answer may be lost with it.
        if request.is_whole and not request.repeated:
            tally.note(f"{request.kind}: no answer", example)
        return
    tally.statuses[answer.status] += 1
    headers = {name.lower(): value for name, value in answer.getheaders()}
    if answer.status >= 500:
        tally.note(f"{request.kind}: {answer.status}", f"{example}: {body[:300]!r}")
    elif answer.status >= 400 and not is_known(answer.status, headers, body):
        tally.note(f"{request.kind}: {answer.status} is no documented problem", f"{example}: {body[:300]!r}")


def _answer(address: tuple[str, int], request: RawRequest) -> tuple[http.client.HTTPResponse | None, bytes]:
    """Return the first final answer, and its body; None if the connection ends, or is left, without one.

    Raises TimeoutError if a request without an end is neither answered nor refused by the end of the connection.
    """
    with socket.create_connection(address, timeout=_ANSWER_SECONDS) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(request.sent)
            for _ in range(_MOST_BYTES // len(request.repeated) if request.repeated else 0):
                connection.sendall(request.repeated)
        if not request.is_whole and not request.repeated:
            connection.settimeout(_UNFINISHED_SECONDS)
        answer = http.client.HTTPResponse(connection, method="HEAD" if request.sent.startswith(b"HEAD ") else "GET")
        with contextlib.closing(answer):
            try:
                answer.begin()
                return answer, answer.read()
            except TimeoutError:
                if request.repeated:
                    raise
                return None, b""
            except (OSError, http.client.HTTPException):
                return None, b""


def raw_request(source: random.Random, host: bytes) -> RawRequest:
    """Return a hostile request of a random kind."""
    return source.choice(_KINDS)(source, host)


def _request(line: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
    return line + _CRLF + b"".join(name + b": " + value + _CRLF for name, value in headers) + _CRLF + body


def _endless_headers(source: random.Random, host: bytes) -> RawRequest:
    begin = b"GET /livez HTTP/1.1\r\nHost: " + host + _CRLF
    start, piece = source.choice(
        [
            (b"X-A: ", b"a" * 65_536),
            (b"", b"X-A: a\r\n" * 1_000),
            (b"", b"X-" + b"n" * 65_536),
            (b"Cookie: ", b"a=b; " * 10_000),
        ]
    )
    return RawRequest("headers without a bound", begin + start, repeated=piece)


def _endless_trailers(source: random.Random, host: bytes) -> RawRequest:
    headers = [(b"Host", host), (b"Content-Type", b"application/json"), (b"Transfer-Encoding", b"chunked")]
    begin = _request(b"POST /v1/runs HTTP/1.1", headers, b"2\r\n{}\r\n0\r\n")
    return RawRequest("trailers without a bound", begin, repeated=b"X-A: a\r\n" * 1_000)


def _request_line(source: random.Random, host: bytes) -> RawRequest:
    method = source.choice(
        [b"GET", b"get", b"", b"G E T", b"PROPFIND", b"CONNECT", b"TRACE", b"OPTIONS", b"HEAD", b"G\x00T", b"\xff\xfe",
         b"M" * 5_000]
    )  # fmt: skip
    target = source.choice(
        [b"/livez", b"*", b"", b"livez", b"//", b"/" + b"../" * 20, b"http://" + host + b"/livez", b"http://[::1",
         b"/%zz", b"/%00", b"/\x00", b"/\xc3\xa9", b"/\xff", b"/livez?" + b"a=1&" * 5_000, b"/v1/runs?limit=%",
         b"?", b"#",
         b"/livez#x", b"/a b", host, b"/v1/runs/" + b"%2f" * 500]
    )  # fmt: skip
    version = source.choice(
        [b"HTTP/1.1"] * 4
        + [b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"HTTP/1.1 x", b"", b"ICY"]
    )
    separator = source.choice([b" "] * 6 + [b"  ", b"\t", b""])
    return RawRequest("request line", _request(separator.join((method, target, version)), [(b"Host", host)]))


def _length(source: random.Random, host: bytes) -> RawRequest:
    """Lengths of a body that are wrong, or more than come; only one within the cap may be waited for."""
    length, is_whole = source.choice(
        [(b"-1", True), (b"+2", True), (b"0x2", True), (b"9" * 19, True), (b"9" * 40, True), (b"9" * 5_000, True),
         (b"2 2", True),
         (b"2, 2", True), (b"\xc2\xb2", True), (b"9223372036854775807", True), (b"18446744073709551615", True),
         (b"1000000000", True), (b"1000", False)]
    )  # fmt: skip
    headers = [(b"Host", host), (b"Content-Type", b"application/json"), (b"Content-Length", length)]
    if source.random() < 0.3:
        other = source.choice([(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")])
        return RawRequest("length", _request(b"POST /v1/runs HTTP/1.1", [*headers, other], b"{}"), is_whole=False)
    return RawRequest("length", _request(b"POST /v1/runs HTTP/1.1", headers, b"{}"), is_whole)


def _chunks(source: random.Random, host: bytes) -> RawRequest:
    chunks, is_whole = source.choice(
        [(b"zz\r\n{}\r\n0\r\n\r\n", True), (b"-2\r\n{}\r\n0\r\n\r\n", True), (b"2\r\n{}", False), (b"\r\n", True),
         (b"f" * 30 + b"\r\n", True), (b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n", True),
         (b"7fffffffffffffff\r\n{}", False),
         (b"1\r\n{}\r\n0\r\n\r\n", True)]
    )  # fmt: skip
    encoding = source.choice([b"chunked"] * 4 + [b"gzip, chunked", b"chunked, chunked", b"x", b""])
    headers = [(b"Host", host), (b"Content-Type", b"application/json"), (b"Transfer-Encoding", encoding)]
    # Another encoding than chunked has no end but that of the connection.
    whole = is_whole and encoding == b"chunked"
    return RawRequest("chunks", _request(b"POST /v1/runs HTTP/1.1", headers, chunks), whole)


def _header_lines(source: random.Random, host: bytes) -> RawRequest:
    line = source.choice(
        [b"X-A", b": x", b"X A: x", b" X-A: x", b"X-A: \x00", b"X-A: a\rb", b"X-\xff: a", b"X-A: \x7f", b"X-A: a\r\n b",
         b"Authorization: Bearer \xff\xfe", b"Authorization: " + b"Bearer " * 100,
         b"Cookie: foreshock_session=\xff.\x01",
         b"Cookie: =;;==", b"Accept: " + b"*/*;q=x," * 50, b"Accept-Encoding: gzip;q=nan", b"If-None-Match: \xff\"",
         b"Content-Encoding: \xff", b"Expect: 100-continue", b"Connection: upgrade\r\nUpgrade: websocket",
         b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c", b"X-Request-Id: " + b"\x1b[31m" * 20,
         b"traceparent: 00-zz"]
    )  # fmt: skip
    path = source.choice([b"/livez", b"/v1/runs", b"/", b"/metrics"])
    sent = b"GET " + path + b" HTTP/1.1\r\nHost: " + host + _CRLF + line + _CRLF + _CRLF
    return RawRequest("header line", sent)


_KINDS: tuple[Callable[[random.Random, bytes], RawRequest], ...] = (
    _endless_headers, _endless_trailers, _request_line, _length, _chunks, _header_lines,
)  # fmt: skip
