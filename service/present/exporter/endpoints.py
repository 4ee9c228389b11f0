"""HTTP: /metrics, in the format that the scraper asks for (Prometheus text, or OpenMetrics)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from service.platform.context import Context
from service.platform.health.figures import ServiceCollector
from service.platform.security import Reader
from service.present.exporter.collector import BucketMemory, ForeshockCollector

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(request: Request, context: Context, principal: Reader) -> Response:
    """Return the newest measures of running runs, their advice and alerts, and the probes, for Prometheus."""
    # A registry for this scrape: no metrics of the process or of another application.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ForeshockCollector(context, request.app.version, _bucket_memory(request), principal.project))
    if principal.project is None:
        registry.register(ServiceCollector(request.app.state.figures))
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=media_type)


def _bucket_memory(request: Request) -> BucketMemory:
    """Return the application's memory of bucket tables."""
    state = request.app.state
    if not hasattr(state, "exporter_buckets"):
        state.exporter_buckets = BucketMemory()
    memory: BucketMemory = state.exporter_buckets
    return memory
