"""Replay the checkpointed steps of a record in this process and print the largest difference from what was logged.

    python -m examples.tiny_rl.verify examples/tiny_rl/recorded

log μ is scored again by vLLM prefill, log π by the trainer's forward pass, held to the instruction set that the
record's manifest names. If the CPU has it, both agree within 1e-5.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from examples.tiny_rl.model import load_model
from examples.tiny_rl.policy import next_token_log_probs, pad
from examples.tiny_rl.record import RECORDED, RunRecord
from examples.tiny_rl.sampler import Sampler
from foreshock.fingerprint import Fingerprint
from foreshock_probes.engines.environment import EngineEnvironment, hold_this_process


@dataclass(frozen=True, slots=True)
class Replay:
    """Largest |difference| between replayed and logged log-probs of a step, nats."""

    step: int
    rollout: float
    trainer: float


def verify(record: RunRecord) -> list[Replay]:
    """Return one `Replay` per checkpoint of the record."""
    replays = []
    sampler: Sampler | None = None
    for checkpoint in record.manifest().checkpoints:
        folder = record.folder / checkpoint.path
        if sampler is None:
            sampler = Sampler(folder, seed=0)
        else:
            sampler.reload(folder)
        batch = record.rollouts(checkpoint.step)
        prompts = rows(batch.prompt_token_ids, batch.prompt_offsets)
        responses = rows(batch.response_token_ids, batch.response_offsets)
        padded = pad(prompts, responses)
        with torch.no_grad():
            trainer, _ = next_token_log_probs(load_model(folder), padded)
        assert batch.rollout_log_probs is not None
        assert batch.trainer_log_probs is not None
        replays.append(
            Replay(
                step=checkpoint.step,
                rollout=_largest(sampler.score(prompts, responses), batch.rollout_log_probs),
                trainer=_largest(trainer[padded.response_mask].numpy(), batch.trainer_log_probs),
            )
        )
    return replays


def rows(values: NDArray[np.int32], offsets: NDArray[np.int64]) -> list[list[int]]:
    """Split flat values at `offsets`."""
    return [part.tolist() for part in np.split(values, offsets[1:-1])]


def _largest(replayed: Sequence[float] | NDArray[np.float32], logged: NDArray[np.float32]) -> float:
    return float(np.abs(np.asarray(replayed, np.float64) - logged).max())


if __name__ == "__main__":
    transformers_logging.disable_progress_bar()
    chosen = RunRecord(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED)
    made_by = Fingerprint.from_dict(chosen.manifest().engine_fingerprint)
    hold_this_process(EngineEnvironment.of_fingerprint(made_by).nearest())
    for replay in verify(chosen):
        print(f"step {replay.step}: max |d| of vLLM prefill {replay.rollout:.3g}, of the trainer {replay.trainer:.3g}")
