"""Bodies that are small to send but expensive to process: chunks, nesting, unicode, numbers at every
border; valid JSON with a changed value or byte, and requests with changed bytes.

They are sent with and without a key. Meanwhile `/livez` is requested all the time, as an orchestrator does.
"""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import httpx

from benchmarks.bad_input.answers import Tally, is_known
from benchmarks.bad_input.scene import Scene

_MOST_BYTES = 1 << 20
_BORDERS = (
    "0", "-0", "-1", "2147483647", "2147483648", "4294967296", "9007199254740993", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "1e308", "1e309", "-1e309", "5e-324", "1e-400", "NaN", "Infinity",
    "9" * 4300, "9" * 4301, "0." + "0" * 5000 + "1", "1" + "0" * 400, "0x1", "1_0", "+1", "01", ".5", "5.", "true",
    "null",
)  # fmt: skip
_TEXTS = (
    "", "\x00", "\ufeff", "\u202e", "\ud800", "e\u0301" * 200, "\U0010ffff" * 300, "\u200b", "x" * 65_536, "../" * 99,
    "{run}", "%00", "\r\nX: y",
)  # fmt: skip


class Body(NamedTuple):
    """A body of one kind; pieces of an iterator are sent as chunks."""

    kind: str
    content: bytes | Iterator[bytes]


def body(source: random.Random) -> Body:
    """Return a body of a random kind and size."""
    return source.choice(_KINDS)(source, int(2 ** source.uniform(3, 20)))


def _chunks(source: random.Random, size: int) -> Body:
    piece = bytes([source.choice(b' [{"9')]) * source.choice([1, 1, 2, 7, 100])
    return Body("chunks", iter([piece] * min(size // len(piece), 20_000)))


def _nesting(source: random.Random, size: int) -> Body:
    begin, end = source.choice([("[", "]"), ('{"a":', "}"), ('{"values":[', "]}"), ("[{},", "]")])
    count = size // len(begin)
    return Body(
        "nesting", (begin * count + source.choice(["", "1", "null"]) + end * source.choice([0, count])).encode()
    )


def _many(source: random.Random, size: int) -> Body:
    value = source.choice(['"x"', "1", "null", "{}", "[]", *_BORDERS])[:5000]
    values = ",".join(f'"{number}":{value}' for number in range(min(size // (len(value) + 8) + 1, 60_000)))
    return Body(
        "many values", f'{{"values":{{{values}}},"scalar_names":{{{values}}},"key":"k"}}'[:_MOST_BYTES].encode()
    )


def _unicode(source: random.Random, size: int) -> Body:
    text = json.dumps({source.choice(_TEXTS): source.choice(_TEXTS), "key": source.choice(_TEXTS)})
    data = text.encode() if source.random() < 0.5 else json.loads(text).__repr__().encode("utf-8", "surrogatepass")
    cut = data[source.randrange(3) :] + source.choice([b"", b"\xff", b"\xc0\x80", b"\xed\xa0\x80"])
    return Body("unicode", source.choice([cut, text.encode("utf-16"), text.encode("utf-32")]))


def _numbers(source: random.Random, size: int) -> Body:
    a, b = source.choice(_BORDERS), source.choice(_BORDERS)
    shape = source.choice(
        ['{{"values":{{"x":{0},"y":{1}}}}}', '{{"key":"a","resume_step":{0}}}', '{{"key":"k","length_cap":{0}}}',
         '{{"key":"k","initial_learning_rate":{0}}}', '{{"revision":{0},"step":{1},"applied_lr":{0}}}', "{0}"]
    )  # fmt: skip
    return Body("numbers", shape.format(a, b).encode())


_VALID: tuple[dict[str, object], ...] = (
    {"key": "k", "project": "default", "model": "m", "trainer": {"name": "t", "version": "1"}, "length_cap": 8,
     "initial_learning_rate": 1e-6, "advice_mode": "shadow", "hardware": ["a", {"b": [1, 2.5, None, True]}]},
    {"key": "k", "resume_step": 0, "fingerprint": {"engine": "vllm", "flags": {"a": [1]}}},
    {"values": {"reward": 0.5, "grad_norm": None}, "source": "trainer", "names": {"reward": "r"}},
    {"revision": 1, "step": 2, "applied_lr": 1e-6, "applied_scale": 1.0, "attempt": 1},
)  # fmt: skip


def _changed(source: random.Random, size: int) -> Body:
    """Return a valid document with one value replaced, or with some bytes changed, doubled or removed."""
    text = json.dumps(source.choice(_VALID))
    if source.random() < 0.6:
        places = list(re.finditer(r'"[^"]*"|[\d.e-]+|null|true|\{[^{}]*\}|\[[^][]*\]', text))
        place = source.choice(places)
        value = source.choice([*_BORDERS, *map(json.dumps, _TEXTS), "[" * 900 + "]" * 900, place[0] + ":" + place[0]])
        return Body("changed", (text[: place.start()] + value + text[place.end() :]).encode())
    return Body("changed", _with_changed_bytes(source, text.encode()))


def _with_changed_bytes(source: random.Random, data: bytes) -> bytes:
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(data))
        part = source.choice([b"", bytes([source.randrange(256)]), data[at : at + 20] * 2, b"\x00", b"\r\n", b'"'])
        data = data[:at] + part + data[at + source.randrange(3) :]
    return data


def _raw(source: random.Random, size: int) -> Body:
    content = json.dumps(source.choice(_VALID)).encode()
    lines = [
        source.choice(["POST /v1/runs HTTP/1.1", "GET /livez HTTP/1.0", "PUT /v1/runs/run/steps/1/scalars HTTP/1.1"]),
        "Host: 127.0.0.1", "Content-Type: application/json", "Connection: close",
        source.choice([f"Content-Length: {len(content)}", f"Content-Length: {source.choice(_BORDERS)}",
                       "Transfer-Encoding: chunked", "Content-Length: 3\r\nContent-Length: 4", "Expect: 100-continue"]),
    ]  # fmt: skip
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return Body("raw", _with_changed_bytes(source, head) + content)


_KINDS: tuple[Callable[[random.Random, int], Body], ...] = (
    _chunks, _nesting, _many, _unicode, _numbers, _changed, _raw,
)  # fmt: skip


def send_floods(scene: Scene, count: int, seed: int, threads: int = 4) -> Tally:
    """Send `count` bodies; the same seed gives the same bodies. A third have no key, a third a wrong key."""
    tally = Tally()

    def send(number: int) -> tuple[Body, str, httpx.Response | httpx.HTTPError]:
        source = random.Random(f"{seed}/{number}")
        made = body(source)
        if isinstance(made.content, bytes) and made.kind == "raw":
            return made, "raw", _answer_to(scene.url, made.content)
        run = scene.run
        method, path = source.choice(
            [("POST", "/v1/runs"), ("POST", f"/v1/runs/{run}/attempts"), ("POST", f"/v1/runs/{run}/lr-advice/ack"),
             ("PUT", f"/v1/runs/{run}/steps/{source.choice(_BORDERS)[:30]}/scalars"), ("POST", "/login"),
             ("PUT", f"/v1/runs/{run}/steps/{number}/scalars"), ("PUT", f"/v1/runs/{run}/steps/{number}/rollouts/0")]
        )  # fmt: skip
        kind = "application/vnd.apache.parquet" if "rollouts" in path else "application/json"
        headers = {"Content-Type": "application/x-www-form-urlencoded" if path == "/login" else kind}
        headers |= source.choice([{}, {"Authorization": "Bearer fsk_wrong"}, scene.headers("ingest")])
        try:
            return made, path, http.request(method, path, content=made.content, headers=headers)
        except httpx.HTTPError as error:
            return made, path, error

    with httpx.Client(base_url=scene.url, timeout=120) as http, ThreadPoolExecutor(threads) as pool:
        for number, (made, path, answer) in enumerate(pool.map(send, range(count))):
            tally.requests += 1
            example = f"seed {seed}, number {number}, {path}"
            if isinstance(answer, httpx.HTTPError):
                # Bytes that are not a whole request get no answer.
                tally.statuses[0] += 1
                if made.kind != "raw":
                    tally.note(f"{made.kind}: no answer", f"{example}: {answer!r}")
                continue
            tally.statuses[answer.status_code] += 1
            known = answer.status_code < 400 or is_known(
                answer.status_code, answer.headers, answer.content, of_a_form=path == "/login"
            )
            if answer.status_code >= 500 or not known:
                tally.note(f"{made.kind}: {answer.status_code}", f"{example}: {answer.content[:200]!r}")
    return tally


def _answer_to(url: str, data: bytes) -> httpx.Response | httpx.HTTPError:
    """Send the bytes and nothing else; return the first answer."""
    address = httpx.URL(url)
    try:
        with socket.create_connection((address.host, address.port or 80), timeout=120) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    except OSError as error:
        return httpx.ReadError(str(error))
    head, _, content = answer.partition(b"\r\n\r\n")
    status, *headers = head.decode("latin-1").split("\r\n")
    if not head:
        return httpx.ReadError("no answer")
    pairs = [(name, value.strip()) for name, _, value in (line.partition(":") for line in headers)]
    return httpx.Response(int(status.split()[1]), headers=pairs, content=content)


@contextmanager
def watched(url: str) -> Iterator[list[float]]:
    """Request `/livez` all the time; the list gets the seconds of each answer."""
    seconds: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            while not ended.wait(0.01):
                begin = time.perf_counter()
                http.get("/livez")
                seconds.append(time.perf_counter() - begin)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()
