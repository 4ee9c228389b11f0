"""The connection sends its key to the configured address only, and bounds every answer."""

import base64
import logging
import resource
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from benchmarks.broken_service import serve
from foreshock import Client
from foreshock.client.connection import ServiceConnection, configured, shown_address
from foreshock.client.reader import Reader
from foreshock.commands.main import main
from foreshock.errors import ConfigurationError, ServiceUnavailable, WrongService
from tests.foreshock.client.faulty_service import FaultyService
from tests.tls import self_signed


@pytest.fixture
def redirecting(service: FaultyService) -> Iterator[str]:
    """A server that redirects every request to the other service."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", service.url + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_key_does_not_follow_a_redirect(redirecting: str, service: FaultyService) -> None:
    with (
        ServiceConnection(redirecting, "fsk_secret") as connection,
        pytest.raises(WrongService, match=r"redirects to .*; set FORESHOCK_URL"),
    ):
        connection.get_json("/v1/runs")
    assert service.requests == 0


@pytest.mark.parametrize("padded", ["fsk_secret\n", " fsk_secret", "\tfsk_secret\r\n"])
def test_key_is_sent_without_white_space(padded: str, service: FaultyService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_API_KEY", padded)
    for key in (padded, configured(service.url, None)[1]):
        with ServiceConnection(service.url, key) as connection:
            connection.request("GET", "/livez")
    assert [each.headers["Authorization"] for each in service.received] == ["Bearer fsk_secret"] * 2
    assert configured(None, " ")[1] is None


@pytest.mark.parametrize("wrong", ["\u201cfsk_secret\u201d", "fsk_se\ncret", "fsk_se\x7fcret", "fsk_secrét"])
def test_key_that_no_header_can_carry_is_refused_without_showing_it(
    wrong: str, service: FaultyService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORESHOCK_API_KEY", wrong)
    makers: tuple[Callable[[], object], ...] = (
        lambda: ServiceConnection(service.url, wrong),
        lambda: Client(service.url, run_key="run"),
        lambda: Reader(service.url),
    )
    for make in makers:
        with pytest.raises(ConfigurationError, match="an API key must be printable ASCII") as refused:
            make()
        assert "cret" not in str(refused.value)
    assert main(["runs", "--url", service.url]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("foreshock: error: an API key must be printable ASCII")
    assert "cret" not in shown.err + shown.out
    assert service.requests == 0


@pytest.mark.parametrize("place", ["{host}", "{host}/path/@team", "{host}/ "])
def test_password_is_sent_and_not_shown(service: FaultyService, place: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    host = service.url.removeprefix("http://")
    address = "http://zoe7:pa%20ss@" + place.format(host=host)
    assert shown_address(address) == "http://" + place.format(host=host).strip()
    with ServiceConnection(address) as connection:
        assert connection.get_json("/v1/runs") is not None
        expected = "Basic " + base64.b64encode(b"zoe7:pa ss").decode()
        assert service.received[-1].headers["Authorization"] == expected
        service.stop()
        with pytest.raises(ServiceUnavailable) as raised:
            connection.get_json("/v1/runs")
    assert host in str(raised.value)
    assert "pa%20ss" not in str(raised.value) + caplog.text
    assert "zoe7" not in str(raised.value) + caplog.text


def test_password_beside_an_api_key_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="http://host:8765 has a user and password, and there is an API"
    ) as found:
        ServiceConnection("http://ann:secret@host:8765", "fsk_key")
    assert "secret" not in str(found.value)
    assert "fsk_key" not in str(found.value)


@pytest.mark.parametrize(
    "url",
    ["ann:secret@host:8765", "http://ann:sec/secret@host", "http://ann:secret@[::1", "http://[::1", "http://h\x01st:1",
     "localhost:8765", "http://"],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="address must look like") as raised:
        ServiceConnection(url)
    assert "sec" not in str(raised.value).removeprefix("the service's address")


def test_shown_page_has_no_password(service: FaultyService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = Client(service.url.replace("//", "//ann:secret@"), run_key="run", spool_directory=tmp_path)
    client.start_run()
    assert client.flush(60)
    client.close()
    shown = capsys.readouterr().err
    assert f"{service.url}/runs/default/run" in shown
    assert "secret" not in shown


def test_address_is_used_without_the_white_space_around_it(service: FaultyService) -> None:
    with ServiceConnection(f" {service.url}/\n") as connection:
        connection.request("GET", "/livez")
        assert connection.url == service.url


def answering(kind: str) -> Iterator[str]:
    listener, url = serve(kind)
    try:
        yield url
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("gzip bomb", WrongService, "in an encoding that was not asked for"),
        ("gzip bomb as an error", WrongService, "in an encoding that was not asked for"),
        ("chunks without an end", WrongService, "answers with more than 1,048,576 bytes"),
        ("body of an exabyte", WrongService, "answers with more than 1,048,576 bytes"),
        ("nested JSON", WrongService, "is not a Foreshock service"),
        ("headers a byte at a time", ServiceUnavailable, "no whole answer in 1 s"),
        ("1xx without an end", ServiceUnavailable, "no whole answer in 1 s"),
        ("body a byte at a time", ServiceUnavailable, "no whole answer in 1 s"),
        ("429 with no number", ServiceUnavailable, "429 no"),
        ("503 until the year 9999", ServiceUnavailable, "503 no"),
        ("id is a megabyte", None, ""),
    ],
)
def test_answer_is_bounded_in_size_and_time(kind: str, error: type[Exception] | None, text: str) -> None:
    for url in answering(kind):
        connection = ServiceConnection(url, timeout_seconds=1.0, max_answer_bytes=1 << 20)
        begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if error is None:
            connection.get_json("/v1/runs")
        else:
            with pytest.raises(error, match=text):
                connection.get_json("/v1/runs")
        connection.close()
        assert time.monotonic() - begin < 60
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssl.SSLContext]:
    """The context of a server that this module's connections trust."""
    context, certificate = self_signed(tmp_path_factory.mktemp("tls"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificate))
        yield context


@pytest.mark.parametrize("kind", ["silent", "half of the headers", "headers a byte at a time", "body a byte at a time"])
def test_request_over_tls_ends_at_its_deadline(kind: str, tls: ssl.SSLContext) -> None:
    listener, url = serve(kind, tls)
    with listener, ServiceConnection(url, timeout_seconds=1.0) as connection:
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(ServiceUnavailable, match="no whole answer in 1 s"):
                connection.get_json("/v1/runs")
            assert 0.9 < time.monotonic() - begin < 5


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["http", "https"])
def test_request_that_waits_is_interrupted(is_encrypted: bool, tls: ssl.SSLContext) -> None:
    listener, url = serve("silent", tls if is_encrypted else None)
    with listener, ServiceConnection(url) as connection, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(connection.get_json, "/v1/runs")
        begin = time.monotonic()
        while not asked.done() and time.monotonic() < begin + 10:
            # A connection that is not made yet cannot be interrupted.
            time.sleep(0.2)
            connection.interrupt()
        assert time.monotonic() - begin < 10
        with pytest.raises(ServiceUnavailable, match="the client was closed while it waited"):
            asked.result()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("id is a path", "is not a Foreshock service"),
        ("id is null", "is not a Foreshock service"),
        ("attempt is no number", "is not a Foreshock service"),
        ("id is a megabyte", "answers with more than 262,144 bytes"),
        ("digits", "answers with more than 262,144 bytes"),
    ],
)
def test_answer_that_no_service_gives_sends_nothing_to_another_path(kind: str, text: str, tmp_path: Path) -> None:
    for url in answering(kind):
        client = Client(url, run_key="run", spool_directory=tmp_path)
        client.log_scalars(1, {"a": 1.0})
        status = client.flush(1.0)
        assert status.undelivered == 2, "kept until the address is corrected"
        assert client.counters.internal_errors == 0
        assert text in str(status.reason)
        client.close(0.1)
