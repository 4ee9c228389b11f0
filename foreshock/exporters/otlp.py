"""OTLP: gauges by the OpenTelemetry SDK, to a collector.

The SDK reads its own environment variables: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`,
`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`, `OTEL_METRIC_EXPORT_INTERVAL`, … The process's global meter provider is
neither used nor changed.
"""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from foreshock.errors import ConfigurationError
from foreshock.exporters.exporter import ExportedRun, Exporter, StepValues

_FLUSH_SECONDS = 10.0
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class OtlpExporter(Exporter):
    """Sets one gauge per series, such as `foreshock.k3_kl`, and sends them after each step.

    The attributes of a point are `foreshock.project`, `foreshock.run` (the run's key) and `foreshock.attempt`; the
    gauge `foreshock.step` has the step. A late step is not sent: a gauge has the newest value.
    """

    name: ClassVar[str] = "otlp"
    module: ClassVar[str] = "opentelemetry.exporter.otlp.proto.http"

    def __init__(self, *, measures: Sequence[str] | None = None) -> None:
        super().__init__(measures=measures)
        protocol = next((os.environ[name] for name in _PROTOCOL_VARIABLES if os.environ.get(name)), "http/protobuf")
        if protocol != "http/protobuf":
            raise ConfigurationError(f"export='otlp' sends http/protobuf, got OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r}")
        self._provider: Any = None
        self._meter: Any = None
        self._gauges: dict[str, Any] = {}
        self._attributes: dict[str, str | int] = {}
        self._newest = -1

    def start(self, run: ExportedRun) -> None:
        """Make the SDK's exporter, reader and provider."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        if self._provider is None:
            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
            self._provider = MeterProvider([reader], shutdown_on_exit=False)
            self._meter = self._provider.get_meter("foreshock")
        self._attributes = {
            "foreshock.project": run.project,
            "foreshock.run": run.key,
            "foreshock.attempt": run.attempt,
        }

    def write(self, step: StepValues, *, closing: bool) -> bool:
        """Set the gauges and send them."""
        if step.step < self._newest:
            return True
        self._newest = step.step
        for name, value in {**step.values, "step": step.step}.items():
            # The names of instruments have dots where the trackers have slashes.
            dotted = f"foreshock.{name.replace('/', '.')}"
            if dotted not in self._gauges:
                self._gauges[dotted] = self._meter.create_gauge(dotted)
            self._gauges[dotted].set(value, self._attributes)
        self._provider.force_flush(int(_FLUSH_SECONDS * 1000))
        return True

    def close(self, timeout_seconds: float) -> None:
        """Send the newest values once more and stop the reader's thread."""
        if self._provider is not None:
            self._provider.shutdown(timeout_millis=max(1.0, timeout_seconds * 1000))
            self._provider = None
