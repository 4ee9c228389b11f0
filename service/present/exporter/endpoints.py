"""HTTP: /metrics, in the format that the scraper asks for (Prometheus text, or OpenMetrics)."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from foreshock_service.platform import columnar, health, security
from foreshock_service.platform.context import Context
from foreshock_service.present.exporter import collector, families

router = APIRouter(tags=["metrics"])
_FORMATS = {
    "text/plain": {"schema": {"type": "string"}},
    "application/openmetrics-text": {"schema": {"type": "string"}},
}


@router.get("/metrics", response_class=Response, responses={200: {"content": _FORMATS}})
def metrics(request: Request, context: Context, principal: security.Reader) -> Response:
    """Return the newest measures of running runs, their advice and alerts, and the probes, for Prometheus."""
    media_type = families.choose_media_type(request.headers.get("accept", ""))
    body = collector.Collector(context, request.app.version, principal.project).collect().render(media_type)
    if principal.project is None:
        # A registry for this scrape: no metrics of the process or of another application.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(health.ServiceCollector(request.app.state.figures))
        generate = generate_latest if media_type == families.TEXT else generate_openmetrics
        body = body.removesuffix(families.END) + generate(registry)
    body, encoding = columnar.compressed(body, request.headers.get("accept-encoding"))
    return Response(body, media_type=media_type, headers={"Vary": "Accept, Accept-Encoding"} | encoding)
