"""The calls that read the state of the service itself, and who changed what."""

from __future__ import annotations

from functools import partial

from foreshock.reading.parsing import parse
from foreshock.reading.request import Listing, Request, json_request
from foreshock.reading.service_records import AuditRecord, ServiceRecord

__all__ = ["audit", "service"]


def service() -> Request[ServiceRecord]:
    """Return the state of the service: the process that answers, its queues, its jobs. The key needs `admin`."""
    return json_request("/v1/service", [], partial(parse, ServiceRecord), in_project=False)


def audit(*, actor: str | None = None, action: str | None = None, run_id: str | None = None) -> Listing[AuditRecord]:
    """Yield who changed advice, alerts, runs and keys, newest first. The key needs `admin`.

    `action` is such as "alert.acknowledge"; the reader's project does not bound the list, that of its key does.
    """
    query = [("actor", actor), ("action", action), ("run", run_id)]
    return Listing("/v1/audit", query, partial(parse, AuditRecord), in_project=False)
