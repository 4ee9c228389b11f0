"""Requests of a worker whose lease has expired and whose job another worker has done: each must be refused."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import numpy as np

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import ScoreBatch, encode_scores
from foreshock.scorers import REFERENCE

_LOST = "urn:foreshock:problem:lease-lost"
LATE_REQUESTS = 4
"""Requests that `check_refused` sends: heartbeat, scores, complete and fail."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that a worker was seen with, and the fencing token of its job."""

    job: str
    lease: str
    token: int


def check_refused(http: httpx.Client, lease: HeldLease) -> list[str]:
    """Send what a late worker could send, with its token; return a problem for each request that was not refused."""
    scores = ScoreBatch(
        sample_ids=["sample-0-0"],
        log_probs=np.full(3, -1.0, np.float32),
        offsets=np.array([0, 3]),
        fingerprint=Fingerprint(engine="torch"),
    )
    url, token = f"/v1/leases/{lease.lease}", {"token": lease.token}
    answers = {
        "heartbeat": http.post(f"{url}/heartbeat", json=token),
        "scores": http.put(
            f"{url}/scores/0",
            params={"scorer": REFERENCE, "variant": ""},
            content=encode_scores(scores),
            headers={
                "X-Foreshock-Lease-Token": str(lease.token),
                "Content-Type": "application/vnd.apache.parquet",
            },
        ),
        "complete": http.post(f"{url}/complete", json=token),
        "fail": http.post(f"{url}/fail", json={**token, "kind": "final", "reason": "late"}),
    }
    return [
        f"{name} of a lost lease was answered {answer.status_code}: {answer.text[:200]}"
        for name, answer in answers.items()
        if answer.status_code != 409 or answer.json()["type"] != _LOST
    ]
