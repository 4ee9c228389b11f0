"""OpenTelemetry traces, by FORESHOCK_TRACES_URL: a span for each request and for each part of it named by `span`.

Needs the extra `otlp`. Without the setting nothing is imported and a span costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreshock.errors import ConfigurationError
from foreshock.installing import install_command
from foreshock_service.platform.logs.request_ids import current_request_id
from foreshock_service.platform.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

# Of this process; None: no traces.
_tracer: Tracer | None = None


def span(name: str, **attributes: str | int | float) -> AbstractContextManager[object]:
    """Return a context that is a span of the current trace; nothing if traces are off."""
    if _tracer is None:
        return nullcontext()
    return _tracer.start_as_current_span(name, attributes=attributes)


def add_tracing(app: FastAPI, settings: Settings) -> None:
    """Send traces of this application, if the setting says where. Raises ConfigurationError if the extra is missing."""
    if not settings.traces_url:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(f"FORESHOCK_TRACES_URL needs the extra: {install_command('otlp')}") from error
    global _tracer
    provider = TracerProvider(
        resource=Resource.create({"service.name": "foreshock", "service.version": app.version}),
        shutdown_on_exit=False,
    )
    # In a thread of its own; spans that a collector does not take are dropped, never waited for.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.traces_url, timeout=5)))
    _tracer = provider.get_tracer("foreshock")
    app.state.traces = provider
    app.add_middleware(_RequestSpans, tracer=_tracer)


def stop_tracing(app: FastAPI) -> None:
    """Send what is left of the application's traces."""
    global _tracer
    provider: TracerProvider | None = getattr(app.state, "traces", None)
    if provider is not None:
        _tracer = None
        provider.shutdown()


class _RequestSpans:
    """Middleware that makes a span of each request, a child of the caller's (`traceparent`) if it has one."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request in its span."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._span(scope) as current:

            async def send_noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    current.set_attribute("http.response.status_code", message["status"])
                    current.set_attribute("foreshock.request_id", current_request_id() or "")
                await send(message)

            await self._app(scope, receive, send_noting)
            # Known only now: the template of the path, without what a client wrote in it.
            route = getattr(scope.get("route"), "path", "unknown path")
            current.update_name(f"{scope['method']} {route}")
            current.set_attribute("http.route", route)

    @contextmanager
    def _span(self, scope: Scope) -> Iterator[Any]:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: Headers(scope=scope).get(name, "") for name in ("traceparent", "tracestate")}
        parent = TraceContextTextMapPropagator().extract(carrier)
        with self._tracer.start_as_current_span(
            scope["method"],
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.scheme": scope["scheme"]},
        ) as current:
            yield current
