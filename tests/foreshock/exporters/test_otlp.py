"""The OpenTelemetry SDK sends to a real HTTP receiver, which decodes the protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from foreshock import Client
from foreshock.errors import ConfigurationError
from foreshock.exporters import OtlpExporter
from tests.foreshock.exporters.trained import LATE_STEP, STEPS, curve, train


class Receiver:
    """A collector: the requests that it got, decoded."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], ExportMetricsServiceRequest]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                message = ExportMetricsServiceRequest()
                message.ParseFromString(body)
                receiver.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, message))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def points(self, name: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the values and attributes of a gauge, in the order in which they arrived."""
        found = []
        for _, _, message in self.requests:
            for resource in message.resource_metrics:
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    for point in metric.gauge.data_points if metric.name == name else ():
                        attributes = {
                            each.key: each.value.string_value or each.value.int_value for each in point.attributes
                        }
                        value = point.as_double if point.HasField("as_double") else float(point.as_int)
                        found.append((value, attributes))
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.mark.slow
def test_gauges_arrive_and_the_standard_variables_hold(
    make: Callable[..., Client], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team-a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-trainer")
    client = make("otlp", project="team", export="otlp")
    train(client, lambda step: None)
    assert client.close()
    path, headers, message = receiver.requests[0]
    assert path == "/v1/metrics"
    assert (headers["x-tenant"], headers["content-encoding"]) == ("team-a", "gzip")
    resource = {each.key: each.value.string_value for each in message.resource_metrics[0].resource.attributes}
    assert resource["service.name"] == "my-trainer"
    measured = curve(client, "k3_kl")
    sent = receiver.points("foreshock.k3_kl")
    steps = [value for value, _ in receiver.points("foreshock.step")]
    assert steps == sorted(steps), "the newest value last"
    assert steps[-1] == STEPS[-1]
    for (value, attributes), step in zip(sent, steps, strict=True):
        assert value == pytest.approx(measured[int(step)])
        assert attributes == {"foreshock.project": "team", "foreshock.run": "otlp", "foreshock.attempt": 1}
    assert {step for step in STEPS if step > LATE_STEP} <= set(steps)


def test_another_protocol_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_PROTOCOL='grpc'"):
        OtlpExporter()
