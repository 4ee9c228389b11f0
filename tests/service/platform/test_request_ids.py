"""A request's id: the caller's if it is valid, else a new one; in the answer, in problems, in traces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from foreshock_service.app import create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from tests.service.receiving import serving
from tests.service.sending import make_batch, start_run
from tests.service.server import RunningServer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def test_valid_id_is_kept_and_others_are_replaced(http: httpx.Client) -> None:
    assert http.get("/livez", headers={"X-Request-Id": "job-7.a:1"}).headers["X-Request-Id"] == "job-7.a:1"
    made = set()
    for wrong in ("", "a b", "x" * 65, "a\tb", '"><script>'):
        answer = http.get("/livez", headers={"X-Request-Id": wrong})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["X-Request-Id"])
        made.add(answer.headers["X-Request-Id"])
    assert len(made) == 5


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/runs/none", 404), ("GET", "/nowhere", 404), ("POST", "/v1/runs", 422), ("PUT", "/v1/runs", 405)],
)
def test_problem_has_the_id(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path, headers={"X-Request-Id": "abc"}, json={})
    assert (answer.status_code, answer.json()["request_id"], answer.headers["X-Request-Id"]) == (status, "abc", "abc")


def test_refused_host_has_the_id(http: httpx.Client) -> None:
    answer = http.get("/livez", headers={"X-Request-Id": "abc", "Host": "elsewhere"})
    assert (answer.status_code, answer.json()["request_id"]) == (400, "abc")


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP/HTTP receiver: its address, and what it received."""
    received: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Log nothing."""

    with serving(Receiver) as address:
        yield f"{address}/v1/traces", received


def test_traces_reach_a_collector(
    settings: Settings, decoders: DecoderPool, collector: tuple[str, list[ExportTraceServiceRequest]]
) -> None:
    address, received = collector
    traced = settings.model_copy(update={"traces_url": address})
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with RunningServer(create_app(traced, decoders)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        http.headers["traceparent"] = f"00-{trace_id}-{parent}-01"
        http.headers["X-Request-Id"] = "traced"
        run = start_run(http)
        assert run.put_shard(1, make_batch()).status_code == 201
        assert http.get("/v1/runs/none").status_code == 404
    spans = [
        span for each in received for of in each.resource_spans for scope in of.scope_spans for span in scope.spans
    ]
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    by_name = {span.name: span for span in spans}
    upload = by_name["PUT /v1/runs/{run}/steps/{step}/rollouts/{shard}"]
    assert upload.parent_span_id.hex() == parent
    assert attributes(upload)["http.response.status_code"] == 201
    assert attributes(upload)["foreshock.request_id"] == "traced"
    assert {"decode", "database.write"} <= {span.name for span in spans if span.parent_span_id == upload.span_id}
    assert attributes(by_name["GET /v1/runs/{run}"])["http.response.status_code"] == 404


def attributes(span: Span) -> dict[str, str | int]:
    return {each.key: each.value.int_value or each.value.string_value for each in span.attributes}
