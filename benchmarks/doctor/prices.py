"""Measure the cost of each kind of experiment in plain replays of the same tokens, for three model sizes on this CPU.

    python -m benchmarks.doctor.prices

Rounds are interleaved; ratios are ratios of medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.doctor.lab import Rows, batch_of, new_model, save, updated
from foreshock.doctor import Change
from foreshock.rollouts import RolloutBatch
from foreshock_probes.doctor.experimenter import TorchExperimenter
from foreshock_probes.doctor.forward import logits_of

SIZES = ((64, 2, 1024), (256, 4, 4096), (1024, 4, 16384))
"""(hidden size, layers, vocabulary size)."""
ROUNDS = 3
PROMPT, RESPONSE, ROLLOUTS = 12, 52, 8


def main() -> None:
    """Print the ratios by size."""
    torch.set_num_threads(1)
    for hidden, layers, ids in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            seconds = _of_size(Path(folder), hidden, layers, ids)
        plain = seconds.pop("plain")
        ratios = ", ".join(f"{name} {value / plain:.2f}" for name, value in seconds.items())
        print(
            f"hidden {hidden}, {layers} layers, {ids} ids: a plain replay takes {1e3 * plain:.0f} ms; {ratios}",
            flush=True,
        )


def _of_size(root: Path, hidden: int, layers: int, ids: int) -> dict[str, float]:
    """Return the median seconds of each kind of experiment."""
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": ids}
    model = new_model("random", 0, **shape, initializer_range=0.02)
    engine, old = save(model, root / "step_0010"), save(updated(model, 1, 0.03), root / "step_0007")
    batch = _rollouts(ids)
    lab = TorchExperimenter.of_folders(batch, engine, engine, [old], threads=1)
    plain = Change.of(weights="step_0010", precision="bfloat16")
    held = lab._model(plain)

    def replay(**change: object) -> Callable[[], object]:
        def run() -> None:
            lab._held = None
            lab._replayed(plain.plus(Change.of(**change)), batch)

        return run

    kinds: dict[str, Callable[[], object]] = {
        "plain": lambda: logits_of(held, None, batch, plain, 0, PROMPT),
        "with a copy of the weights": replay(),
        "autocast": replay(precision="autocast"),
        "float32": replay(precision="float32"),
        "other weights": replay(weights="step_0007"),
        "one layer of others": replay(part=("step_0007", "layers.1")),
        "quantised": replay(quantise="fp8_channel"),
        "decode": lambda: logits_of(held, None, batch, plain.plus(Change.of(composition="decode")), 0, PROMPT),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS + 1):
        for name, run in kinds.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def _rollouts(ids: int) -> RolloutBatch:
    random = np.random.default_rng(0)
    prompts, responses = (random.integers(2, ids, (ROLLOUTS, size)).tolist() for size in (PROMPT, RESPONSE))
    zeros = [np.zeros(RESPONSE, np.float32)] * ROLLOUTS
    return batch_of(Rows(prompts, responses, zeros, list(range(ROLLOUTS))), zeros)


if __name__ == "__main__":
    main()
