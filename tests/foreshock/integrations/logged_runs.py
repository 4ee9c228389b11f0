"""Runs that a framework trained, as the service has them."""

from dataclasses import dataclass
from typing import Any

import httpx

from tests.waiting import wait_until


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run, and the connection to the service that it was logged to."""

    http: httpx.Client
    id: str

    def get(self, path: str = "") -> Any:
        """Return the answer of GET below the run."""
        return self.http.get(f"/v1/runs/{self.id}{path}").raise_for_status().json()

    def measures(self, comparison: str, *names: str) -> dict[str, list[float]]:
        """Return measures by step, once the run's newest data is worked out."""
        wait_until(lambda: not self.get()["advancing"])
        query = {"comparison": comparison, "measure": list(names)}
        answer = self.http.get(f"/v1/runs/{self.id}/measurements", params=query)
        return dict(answer.raise_for_status().json()["columns"])

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts, the oldest first."""
        return list(self.get("/attempts")["items"])


def run_named(http: httpx.Client, key: str) -> str:
    """Return the id of the run with a key."""
    runs = http.get("/v1/runs").raise_for_status().json()["items"]
    return str(next(each["id"] for each in runs if each["key"] == key))
