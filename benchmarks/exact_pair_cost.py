"""CPU seconds of the exact pair, compared with those of plainly scoring both of its scorers.

    python -m benchmarks.exact_pair_cost

Both use the same warm engines: the time to load models and to compile the reduction is reported apart. CPU seconds are
those of the engines' processes, so that other work on the machine does not count.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.recorded_runs import shipped_run
from foreshock.hardware import cpu_name
from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock.scorers import EXACT_PAIRS
from foreshock_probes.engines.pool import EnginePool
from foreshock_probes.engines.protocol import ScoreCommand

# Threads that wait for others sleep: by default they spin, which counts as CPU time if the machine does other work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REPEATS = 3
(PAIR,) = EXACT_PAIRS.values()


def main() -> int:
    """Measure the recorded tiny model, and a random one with a vocabulary of 32,768 tokens."""
    print(cpu_name())
    run = shipped_run()
    step = run.steps()[-1]
    measure("recorded run, V = 16", run.checkpoint(step).resolve(), run.rollouts(step))
    with tempfile.TemporaryDirectory() as folder:
        weights = larger_model(Path(folder) / "weights")
        random = np.random.default_rng(0)
        tokens = random.integers(0, 32_768, (32, 288))
        names = [f"sample-{row}" for row in range(32)]
        rollouts = RolloutBatch.from_lists(names, tokens[:, :32].tolist(), tokens[:, 32:].tolist())
        measure("random model, V = 32,768, H = 512, 8 layers", weights, rollouts)
    return 0


def larger_model(folder: Path) -> Path:
    """Save a randomly initialised Qwen3 of 50 million parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    configuration = Qwen3Config(
        vocab_size=32_768, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(configuration).to(torch.bfloat16).save_pretrained(folder)
    return folder


def measure(name: str, weights: Path, rollouts: RolloutBatch) -> None:
    """Print the CPU seconds of plain and of exact scoring, each the least of `REPEATS`."""
    with engines(weights, rollouts) as run:
        start = run(PAIR.target) + run(PAIR.behaviour)
        first = run(PAIR.target, exact=True) + run(PAIR.behaviour, exact=True)
        plain = min(run(PAIR.target) + run(PAIR.behaviour) for _ in range(REPEATS))
        parts = [(run(PAIR.target, exact=True), run(PAIR.behaviour, exact=True)) for _ in range(REPEATS)]
        target, behaviour = min(parts, key=sum)
    print(
        f"{name}: {rollouts.num_rollouts} rollouts, {rollouts.num_tokens} states; plain {plain:.2f} CPU s, exact "
        f"{target + behaviour:.2f} CPU s ({PAIR.target} {target:.2f}, {PAIR.behaviour} {behaviour:.2f}), ratio "
        f"{(target + behaviour) / plain:.1f}; the first plain scoring {start:.1f}, the first exact one {first:.1f}"
    )


class _Run:
    """Runs a command in warm engines and returns the CPU seconds of their processes."""

    def __init__(self, pool: EnginePool, folder: Path, weights: Path) -> None:
        self._pool, self._folder, self._weights = pool, folder, weights

    def __call__(self, scorer: str, *, exact: bool = False) -> float:
        before = self._cpu_seconds()
        command = ScoreCommand(
            number=0,
            scorer=scorer,
            variant="",
            weights_folder=str(self._weights),
            weights_digest="sha256:" + "0" * 64,
            weights_version=None,
            options={},
            accelerator="cpu",
            rollouts=str(self._folder / "rollouts.parquet"),
            scores=str(self._folder / "scores.parquet"),
            pair=PAIR.key if exact else None,
            states=str(self._folder / "states.safetensors") if exact else None,
        )
        self._pool.score(command, lambda tokens: None)
        after = self._cpu_seconds()
        return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())

    def _cpu_seconds(self) -> dict[int, float]:
        ticks = os.sysconf("SC_CLK_TCK")
        found = {}
        for pid in self._pool.process_ids().values():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / ticks
        return found


@contextmanager
def engines(weights: Path, rollouts: RolloutBatch) -> Iterator[_Run]:
    """Yield engines of these weights; they end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rollouts.parquet").write_bytes(encode_rollouts(rollouts))
        pool = EnginePool(Path(folder))
        try:
            yield _Run(pool, Path(folder), weights)
        finally:
            pool.close()


if __name__ == "__main__":
    raise SystemExit(main())
