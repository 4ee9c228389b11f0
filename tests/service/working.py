"""A worker for tests: works over HTTP, with scores that the test chooses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch, ScoreBatch, decode_rollouts, encode_scores
from foreshock.scorers import EXACT_PAIRS, available_scorers
from tests.service.sending import PARQUET, Sender, make_batch, start_run
from tests.waiting import wait_until

EVERYTHING = available_scorers()
PAIR = next(iter(EXACT_PAIRS))
WEIGHTS = "sha256:" + "ab" * 32
STEP = 3
"""The step that the tests of probes have replayed."""


def announce_checkpoint(sender: Sender, step: int, digest: str = WEIGHTS, **fields: Any) -> httpx.Response:
    body = {"root": "runs", "path": f"step-{step}", "format": "hf_safetensors", "digest": digest, **fields}
    return sender.http.put(
        f"/v1/runs/{sender.run}/checkpoints/{step}", params={"attempt": sender.attempt}, json=body
    ).raise_for_status()


def run_to_probe(http: httpx.Client, *steps: int, rollouts: int = 12, **fields: Any) -> Sender:
    """Create a run with closed steps, of which the first has the seed 0, the second 1, …, and their checkpoints."""
    sender = start_run(http, **fields)
    for seed, step in enumerate(steps):
        sender.put_shard(step, make_batch(rollouts, seed)).raise_for_status()
        announce_checkpoint(sender, step)
    return sender


def ask_for_probe(
    sender: Sender, step: int, scorers: Sequence[str] = ("vllm.prefill",), **fields: Any
) -> httpx.Response:
    """Request a probe; a scorer is written `name` or `name@variant`."""
    named = [dict(zip(("scorer", "variant"), name.partition("@")[::2], strict=True)) for name in scorers]
    return sender.http.post(f"/v1/runs/{sender.run}/probes", json={"step": step, "scorers": named, **fields})


def wait_for_attribution(sender: Sender, step: int) -> None:
    """Wait until the attribution of a step is of all published scores."""
    wait_until(lambda: sender.get(f"steps/{step}/attribution").json().get("stale") is False)


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A worker that holds a lease."""

    http: httpx.Client
    lease: dict[str, Any]

    @property
    def url(self) -> str:
        return f"/v1/leases/{self.lease['lease']}"

    @property
    def token(self) -> int:
        token: int = self.lease["token"]
        return token

    def heartbeat(self) -> httpx.Response:
        return self.http.post(f"{self.url}/heartbeat", json={"token": self.token})

    def get_rollouts(self) -> httpx.Response:
        return self.http.get(f"{self.url}/rollouts", headers=self._headers)

    def rollouts(self) -> RolloutBatch:
        return decode_rollouts(self.get_rollouts().raise_for_status().content)

    def put_scores(self, body: bytes | ScoreBatch, scorer: str = "vllm.prefill", variant: str = "") -> httpx.Response:
        content = body if isinstance(body, bytes) else encode_scores(body)
        query = {"scorer": scorer, "variant": variant}
        headers = {**self._headers, "Content-Type": PARQUET}
        return self.http.put(f"{self.url}/scores", params=query, content=content, headers=headers)

    def put_document(self, body: dict[str, Any], document: str = "") -> httpx.Response:
        """Send the document of the job's kind of probe, or that of another kind."""
        name = document or self.lease["job"]["kind"]
        return self.http.put(f"{self.url}/{name}", json=body, headers=self._headers)

    def complete(self) -> httpx.Response:
        return self.http.post(f"{self.url}/complete", json={"token": self.token})

    def fail(self, kind: str, reason: str = "out of memory") -> httpx.Response:
        return self.http.post(f"{self.url}/fail", json={"token": self.token, "kind": kind, "reason": reason})

    @property
    def _headers(self) -> dict[str, str]:
        return {"X-Foreshock-Lease-Token": str(self.token)}


def ask_for_lease(
    http: httpx.Client, worker: str = "w1", scorers: Sequence[str] = EVERYTHING, **fields: Any
) -> httpx.Response:
    return http.post("/v1/leases", json=lease_request(worker, scorers, **fields))


def lease_request(worker: str = "w1", scorers: Sequence[str] = EVERYTHING, **fields: Any) -> dict[str, Any]:
    return {"worker": worker, "accelerator": "cpu", "device_name": "a CPU", "scorers": list(scorers), **fields}


def take_lease(http: httpx.Client, worker: str = "w1", **fields: Any) -> LeaseHolder:
    answer = ask_for_lease(http, worker, **fields)
    assert answer.status_code == 200, answer.text
    return LeaseHolder(http, answer.json())


def scores_of(
    rollouts: RolloutBatch, log_probs: NDArray[np.float32], engine: str = "vllm", **fingerprint: Any
) -> ScoreBatch:
    """Return the scores that a worker sends: log-probs [T] of all rollouts."""
    made = Fingerprint(engine=engine, dtype="bfloat16", **fingerprint)
    return ScoreBatch(rollouts.sample_ids, log_probs, rollouts.response_offsets, made)


def noisy(rollouts: RolloutBatch, seed: int, scale: float = 0.02) -> NDArray[np.float32]:
    """Return the logged log-probs with noise, [T], as another engine would compute them."""
    assert rollouts.rollout_log_probs is not None
    noise = np.random.default_rng(seed).normal(0, scale, rollouts.num_tokens)
    return np.minimum(rollouts.rollout_log_probs + noise, 0.0).astype(np.float32)


def work_off(http: httpx.Client, seed: int = 1, **fields: Any) -> int:
    """Do every queued job with noisy scores, and return their number."""
    done = 0
    while (answer := ask_for_lease(http, **fields)).status_code == 200:
        holder = LeaseHolder(http, answer.json())
        rollouts = holder.rollouts()
        for number, each in enumerate(holder.lease["job"]["scorers"]):
            values = noisy(rollouts, seed + number + len(each["scorer"]))
            body = scores_of(rollouts, values, engine=each["scorer"].partition(".")[0])
            holder.put_scores(body, each["scorer"], variant=each["variant"]).raise_for_status()
        holder.complete().raise_for_status()
        done += 1
    return done
