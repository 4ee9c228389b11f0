"""Runs of the service under test whose steps are probed."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from foreshock.digests import weights_digest
from foreshock.rollouts import RolloutBatch, encode_rollouts

ROOT = "runs"


@dataclass(frozen=True, slots=True)
class ProbedRun:
    """A run with one attempt; the weights of its steps are in folders below `root`."""

    http: httpx.Client
    root: Path
    run: str

    @classmethod
    def start(cls, http: httpx.Client, root: Path) -> ProbedRun:
        """Start a run."""
        run = http.post("/v1/runs", json={"key": uuid.uuid4().hex}).raise_for_status().json()["id"]
        http.post(f"/v1/runs/{run}/attempts", json={"key": "first"}).raise_for_status()
        return cls(http, root, run)

    def log_step(self, step: int, rollouts: RolloutBatch) -> None:
        """Upload the rollouts of a step, in one shard."""
        self.http.put(
            f"/v1/runs/{self.run}/steps/{step}/rollouts/0",
            params={"attempt": 1, "shards": 1},
            content=encode_rollouts(rollouts),
            headers={"Content-Type": "application/vnd.apache.parquet"},
        ).raise_for_status()

    def announce(self, step: int, path: str, digest: str | None = None, root: str = ROOT) -> None:
        """Announce the weights in the folder `path` for a step; `digest` None: their own."""
        body = {
            "root": root,
            "path": path,
            "format": "hf_safetensors",
            "digest": digest or weights_digest(self.root / path),
        }
        url = f"/v1/runs/{self.run}/checkpoints/{step}"
        self.http.put(url, params={"attempt": 1}, json=body).raise_for_status()

    def probe(
        self, step: int, scorers: Collection[str], options: Mapping[str, Mapping[str, object]] | None = None
    ) -> str:
        """Request a probe, scored in the environment of the worker as it is; return its id."""
        chosen = {name: dict(values) for name, values in (options or {}).items() if name in scorers}
        body = {
            "step": step,
            "scorers": [{"scorer": name} for name in scorers],
            "options": chosen,
            "environment": "any",
        }
        answer = self.http.post(f"/v1/runs/{self.run}/probes", json=body).raise_for_status()
        return str(answer.json()["id"])


def rows(database: Path, query: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
    """Return the rows of a query on the database of the service under test, which goes on."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(query, values)]
