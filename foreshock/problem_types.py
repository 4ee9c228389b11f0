"""Names of problem types of the API that the client acts on, and what every name begins with."""

from __future__ import annotations

__all__ = ["HOST_NOT_ALLOWED", "PROBLEM_TYPE_PREFIX", "RUN_NOT_FOUND"]

PROBLEM_TYPE_PREFIX = "urn:foreshock:problem:"

HOST_NOT_ALLOWED = "host-not-allowed"
RUN_NOT_FOUND = "run-not-found"
