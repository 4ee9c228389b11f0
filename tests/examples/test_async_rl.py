"""The asynchronous example runs with a real service, and its lag is in every key that has one."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np

from tests.foreshock.running_service import running_service
from tests.paths import REPOSITORY

STEPS = 30


def test_example_logs_the_version_that_sampled_each_token(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        environment = {**os.environ, "FORESHOCK_URL": service.url, "FORESHOCK_SPOOL_DIRECTORY": str(tmp_path / "spool")}
        ran = subprocess.run(
            [sys.executable, "-m", "examples.async_rl.train", "--steps", str(STEPS), "--run-key", "async"],
            cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert "delivered: True" in ran.stdout
        run = f"{service.url}/v1/runs/async"

        def get(path: str, **query: str) -> dict[str, object]:
            answer: dict[str, object] = httpx.get(f"{run}/{path}", params=query, timeout=60).raise_for_status().json()
            return answer

        columns = get("measurements", comparison="rollout")["columns"]
        assert isinstance(columns, dict)
        assert columns["step"] == list(range(STEPS))
        largest = np.array(columns["lag_max"][5:], dtype=float)
        # The queue holds two batches, so that rollouts are some versions behind and none is ahead.
        assert largest.min() >= 1
        assert np.min(np.array(columns["lag_mean"], dtype=float)) >= 0
        step = str(STEPS - 1)
        buckets = get(f"steps/{step}/buckets", by="lag")["columns"]
        assert isinstance(buckets, dict)
        edges = get(f"steps/{step}/buckets", by="lag")["edges"]
        assert isinstance(edges, list)
        used = [edge for edge, tokens in zip(edges, buckets["tokens"], strict=False) if tokens]
        assert used
        assert None not in used
        corrections = get(f"steps/{step}/corrections", correction="token_tis")["items"]
        assert isinstance(corrections, list)
        affected = corrections[0]["affected"]
        means = [affected[part]["lag_mean"] for part in ("touched", "untouched") if affected[part]["sequences"]]
        assert means
        assert all(mean is not None for mean in means)
        # Rules of comparisons hold at lag 0; at another lag the run's own baseline is used.
        rules = {alert["rule"] for alert in httpx.get(f"{run}/alerts", timeout=60).json()["items"]}
        assert not rules & {"mismatch_warning", "mismatch_critical"}
