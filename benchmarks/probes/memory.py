"""Peak memory of the engines' processes above the loaded model, for two vocabularies and two numbers of tokens.

The smallest product of the two needs 2 GiB of logits, which is more than scorers hold at a time. Below that, memory
grows with the product, as it should.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.probes.workload import make_rollouts, save_model
from benchmarks.replay import Replayer
from foreshock.scorers import ENGINE_REPLAY, TRAINER_REPLAY
from foreshock_probes.engines.process import EnginePool

__all__ = ["Growth", "measure_memory"]

VOCABULARIES = (16_384, 131_072)
TOKENS = (32_768, 131_072)
# The trainer's replay has several batches in each case: its memory is that of a batch.
OPTIONS: dict[str, dict[str, Any]] = {TRAINER_REPLAY: {"batch_tokens": 4_096}}
HIDDEN, LAYERS = 128, 2
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Growth:
    """Peaks in bytes by vocabulary and tokens.

    `product_share`: how the peaks grow with vocabulary × tokens, beyond what each of the two adds alone (the second
    difference of the four peaks), as a share of that of logits [T, V] in float32. The head's weights grow with the
    vocabulary and the rollouts with the tokens, so that a peak cannot stay where it was.
    """

    name: str
    peaks: dict[tuple[int, int], int]

    @property
    def ratio(self) -> float:
        return max(self.peaks.values()) / self.peaks[min(self.peaks)]

    @property
    def product_share(self) -> float:
        (small, large), (few, many) = VOCABULARIES, TOKENS
        peaks = self.peaks
        found = peaks[large, many] - peaks[large, few] - peaks[small, many] + peaks[small, few]
        return found / (4 * (large - small) * (many - few))

    def __str__(self) -> str:
        lines = [
            f"{self.name:<16}V = {vocabulary:>7,}, {tokens:>6,} tokens: {peak / MIB:>6.0f} MiB above the loaded model; "
            f"[T, V] in float32 would be {4 * vocabulary * tokens / MIB:>6,.0f} MiB"
            for (vocabulary, tokens), peak in self.peaks.items()
        ]
        found = (
            f"{self.product_share:.2%} of logits [T, V] grow with V × T; the last peak is {self.ratio:.2f} of the first"
        )
        return "\n".join([*lines, f"{self.name:<16}{found}"])


def measure_memory(folder: Path) -> Iterator[Growth]:
    """Measure the replays of trainer and engine with `OPTIONS`."""
    for name in (TRAINER_REPLAY, ENGINE_REPLAY):
        peaks = {}
        for vocabulary in VOCABULARIES:
            weights = folder / f"memory-{vocabulary}"
            if not weights.exists():
                save_model(weights, vocabulary, HIDDEN, LAYERS)
            for tokens in TOKENS:
                peaks[vocabulary, tokens] = _peak(folder, weights, name, vocabulary, tokens)
        yield Growth(name, peaks)


def _peak(folder: Path, weights: Path, name: str, vocabulary: int, tokens: int) -> int:
    """Return the bytes by which a new engine's resident memory grows while it scores, its model being loaded."""
    pool = EnginePool(folder)
    try:
        replay = Replayer(folder, pool)
        replay.score(make_rollouts(vocabulary, 64), weights, name, **OPTIONS.get(name, {}))
        (process,) = replay.process_ids().values()
        before = _status(process, "VmRSS")
        Path(f"/proc/{process}/clear_refs").write_text("5")  # resets VmHWM
        replay.score(make_rollouts(vocabulary, tokens), weights, name, **OPTIONS.get(name, {}))
        return _status(process, "VmHWM") - before
    finally:
        pool.close()


def _status(process: int, name: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
