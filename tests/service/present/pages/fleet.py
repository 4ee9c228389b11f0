"""Five kinds of run behind the pages, sent to a service as trainers send them: a collapse has causes that are known.

learning: the reward and the lengths rise, the mismatch is healthy. learning-rate: the reward falls at step 40 with a
healthy mismatch. mismatch: log-probs of the trainer drift from step 30 on, the lengths surge, the reward falls at
step 50. experts: a mixture of experts with the mismatch of one. incomplete: one rank of four is silent from step 12 on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from foreshock.api.records import to_json
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import BatchAttributes, RolloutBatch, ScoreBatch
from tests.foreshock.certify.making import certificate, not_tried, row
from tests.service.sending import Sender, start_run
from tests.service.working import announce_checkpoint, ask_for_probe, take_lease, wait_for_attribution
from tests.waiting import wait_until

STEPS = 64
REPLAYED_STEP = 60
SILENT_RANK, SILENT_FROM, RANKS = 2, 12, 4
WORST_D = -3.5
GROUPS, RESPONSES = 8, 4
# Complete, so that a link between two of them can be named a cause.
_MACHINE: dict[str, Any] = {
    "device_name": "NVIDIA A100", "driver": "580.1", "dtype": "bfloat16", "library_versions": {"torch": "2.13.0"},
    "attention_backend": "FLASH_ATTN",
}  # fmt: skip
ENGINE = Fingerprint(engine="vllm", engine_version="0.32.0", **_MACHINE)
TRAINER = Fingerprint(engine="torch", engine_version="2.13.0", **_MACHINE)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a run does at a step: values that its rollouts and scalars are drawn around."""

    reward: Callable[[int], float]
    length: Callable[[int], float]
    noise: Callable[[int], float]
    entropy: Callable[[int], float] = lambda step: 0.9
    gradient: Callable[[int], float] = lambda step: 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    flipped: float = 1.0
    """Share of the tokens whose log-probs differ: a mixture of experts routes some tokens otherwise."""
    steps: int = STEPS
    outlier: bool = False
    """One token of REPLAYED_STEP has a d of WORST_D."""


def between(start: int, end: int, low: float, high: float) -> Callable[[int], float]:
    """Return a value that goes from `low` at the step `start` to `high` at `end`, and stays."""
    return lambda step: float(np.interp(step, [start, end], [low, high]))


_SETTINGS = {
    "model": "qwen-tiny", "trainer": "verl 0.9.1", "engine": "vLLM 0.32.0", "model_kind": "dense",
    "initial_learning_rate": 1e-6,
}  # fmt: skip
KINDS: Mapping[str, Kind] = {
    "learning": Kind(
        between(1, STEPS, 0.2, 0.8), between(1, STEPS, 24, 40), lambda step: 0.012, between(1, STEPS, 0.9, 0.6),
        settings={**_SETTINGS, "hardware": "NVIDIA H20"}, steps=40,
    ),
    "learning-rate": Kind(
        lambda step: 0.8 if step < 40 else 0.03, between(36, 44, 30, 9), lambda step: 0.012,
        between(34, 42, 0.9, 0.05), between(36, 40, 1.0, 9.0), settings={**_SETTINGS, "hardware": "NVIDIA H20"},
    ),
    "mismatch": Kind(
        lambda step: 0.7 if step < 50 else 0.04, between(32, 42, 20, 60), between(30, 56, 0.015, 0.3),
        gradient=between(40, 50, 1.0, 6.0),
        settings={**_SETTINGS, "hardware": "NVIDIA A100", "advice_mode": "apply"}, outlier=True,
    ),
    "experts": Kind(
        between(1, STEPS, 0.3, 0.6), lambda step: 30, lambda step: 0.3, lambda step: 0.4,
        settings={**_SETTINGS, "model": "moe-tiny", "model_kind": "moe", "hardware": "NVIDIA H20"}, flipped=0.06,
        steps=40,
    ),
    "incomplete": Kind(
        between(1, STEPS, 0.2, 0.6), lambda step: 30, lambda step: 0.012,
        settings={**_SETTINGS, "hardware": "NVIDIA H20"}, ranks=RANKS, steps=24,
    ),
}  # fmt: skip


def rollouts_of(kind: Kind, step: int, rank: int = 0) -> RolloutBatch:
    random = np.random.default_rng((step, rank))
    rollouts = GROUPS * RESPONSES // kind.ranks
    lengths = np.maximum(random.normal(kind.length(step), 2.0, rollouts).round().astype(int), 2)
    tokens = int(lengths.sum())
    # Drawn so that the mean of -log μ is the entropy, as of tokens that μ sampled.
    behaviour = -random.exponential(kind.entropy(step), tokens).astype(np.float32)
    differs = random.random(tokens) < kind.flipped
    # Never 0, which is the log-prob that a trainer's mask leaves.
    trainer = -np.abs(behaviour + differs * random.normal(0.0, kind.noise(step), tokens)).astype(np.float32) - 1e-6
    if kind.outlier and step == REPLAYED_STEP:
        behaviour[7], trainer[7] = -0.25, -0.25 + WORST_D
    return RolloutBatch.from_arrays(
        sample_ids=[f"{step}-{rank}-{number}" for number in range(rollouts)],
        prompt_token_ids=np.tile(np.arange(4, dtype=np.int32), rollouts),
        prompt_offsets=np.arange(rollouts + 1, dtype=np.int64) * 4,
        response_token_ids=random.integers(1, 100, tokens).astype(np.int32),
        response_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rollout_log_probs=behaviour,
        trainer_log_probs=trainer,
        entropy=np.full(tokens, kind.entropy(step), np.float32),
        group_ids=[f"{step}-{rank}-{number // RESPONSES}" for number in range(rollouts)],
        reward=np.clip(random.normal(kind.reward(step), 0.03, rollouts), 0.0, 1.0).astype(np.float32),
        weights_version=np.full(tokens, step, np.int32),
        attributes=BatchAttributes(
            temperature=1.0, trainer_weights_version=step, engine_fingerprint=ENGINE, trainer_fingerprint=TRAINER
        ),
    )


def send_kind(http: httpx.Client, name: str) -> Sender:
    """Send a whole run of a kind; its key is the kind's name."""
    kind = KINDS[name]
    sender = start_run(http, name, **kind.settings)
    for step in range(1, kind.steps + 1):
        gradient = kind.gradient(step) * float(np.random.default_rng(step).uniform(0.9, 1.1))
        sender.put_scalars(step, {"grad_norm": gradient}).raise_for_status()
        for rank in range(kind.ranks):
            if kind.ranks > 1 and rank == SILENT_RANK and step >= SILENT_FROM:
                continue
            sender.put_shard(step, rollouts_of(kind, step, rank), rank, kind.ranks).raise_for_status()
    return sender


def wait_until_closed(sender: Sender) -> None:
    """Wait until the steps that lack a shard are closed."""
    wait_until(lambda: all(each["closed"] for each in sender.get("steps", limit=200).json()["items"]))


def acknowledge(sender: Sender) -> None:
    """Ask for the advice as the trainer does, and report that it was applied."""
    advice = sender.get("lr-advice", step=STEPS).raise_for_status().json()
    scale = advice["scale"]
    body = {"revision": advice["revision"], "step": STEPS, "applied_lr": 1e-6 * scale, "applied_scale": scale}
    sender.http.post(f"/v1/runs/{sender.run}/lr-advice/ack", json=body).raise_for_status()


def replay_as_engine_difference(sender: Sender, kind: Kind) -> None:
    """Replay a step so that the engine reproduces the rollout, and torch the trainer: they are what differs."""
    announce_checkpoint(sender, REPLAYED_STEP)
    ask_for_probe(sender, REPLAYED_STEP, ("vllm.prefill", "torch.trainer", "torch.float32")).raise_for_status()
    sent = rollouts_of(kind, REPLAYED_STEP)
    for _ in range(2):
        holder = take_lease(sender.http)
        asked = holder.rollouts()
        for number, each in enumerate(holder.lease["job"]["scorers"]):
            scorer: str = each["scorer"]
            near = sent.rollout_log_probs if scorer == "vllm.prefill" else sent.trainer_log_probs
            assert near is not None
            made = ENGINE if scorer.startswith("vllm") else TRAINER
            body = ScoreBatch(asked.sample_ids, _nearly(near, number), asked.response_offsets, made)
            holder.put_scores(body, scorer, variant=each["variant"]).raise_for_status()
        holder.complete().raise_for_status()
    wait_for_attribution(sender, REPLAYED_STEP)


def _nearly(log_probs: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    noise = np.random.default_rng(seed).normal(0.0, 1e-4, log_probs.size)
    return -np.abs(log_probs + noise).astype(np.float32)


def send_certificates(http: httpx.Client) -> tuple[str, ...]:
    """Send two certificates of a model, of which the newer one has a worse row; return their ids, the newer first."""
    same = [row(name, 0.01, seed=number) for number, name in enumerate(("batch_8", "restart", "temperature"), 2)]
    found = []
    for noise, made_at in ((0.01, "2026-11-28T12:00:00Z"), (0.5, "2026-11-29T12:00:00Z")):
        first = row("trainer/vllm.prefill", noise, cause="norm_eps", why=("The norms' ε is 1e-5, not 1e-6.",))
        rows = (first, row("prefill", 0.0, seed=0), *same, not_tried("lora", "the model has no adapter"))
        body = certificate(*rows, made_at=made_at, fingerprints={"vllm.prefill": ENGINE.to_dict()})
        found.append(http.post("/v1/certificates", json=to_json(body)).raise_for_status().json()["id"])
    return tuple(reversed(found))
