"""The service itself."""

from collections.abc import Mapping
from typing import Annotated

from foreshock.api.records import Record


class ReadinessRecord(Record):
    """The outcome of each check: `ok`, or the reason why it fails."""

    ready: bool
    checks: Mapping[str, str]
    details: Annotated[Mapping[str, str], "`token_pass`: `compiled`, or numpy and why"]


class ServiceRecord(Record):
    """The release of the service, and what it accepts."""

    version: str
    statistics_version: Annotated[int, "of the statistics that clients may send"]
    processes: Annotated[int, "processes that serve this address"]
    upload_places: Annotated[int, "uploads that a process takes at a time; further ones get 503 with Retry-After"]
