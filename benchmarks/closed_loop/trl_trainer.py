"""The loop with TRL's real trainer, the real hook and a real service: `python -m benchmarks.closed_loop.trl_trainer`.

A tiny transformer writes 1 and 2 by turns; the engine is transformers' `generate`, so nothing lags, and the rate is too
high from the first step. Arms are the constant rate, and the advice in apply mode. Runs are kept in `build/`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from transformers import TrainerCallback

from benchmarks.running_service import running_service
from examples.trl.train import new_trainer
from foreshock.client.client import Client
from foreshock.client.reader import Reader
from foreshock.diagnosis.collapse import collapse_step
from foreshock.integrations.trl import ForeshockCallback

KEPT: Final = Path("build/closed_loop_trl.jsonl")
ARMS: Final = ("constant", "remedy")
FIRST_SEED: Final = 80_000
RATE: Final = 5e-2
STEPS: Final = 40
LENGTH: Final = 12
PATIENCE_SECONDS: Final = 20.0


def reward_of_turns(completions: list[str], **_: Any) -> list[float]:
    """Return the fraction of places of each completion that have a 1, then a 2, and so on."""
    wanted = "12" * (LENGTH // 2)
    return [sum(a == b for a, b in zip(each, wanted, strict=False)) / LENGTH for each in completions]


class Slow(TrainerCallback):  # type: ignore[misc]  # transformers ships no types.
    """Waits after each step until the service has judged it: real steps take longer than that."""

    def __init__(self, client: Client, reader: Reader) -> None:
        self._client, self._reader = client, reader

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._client.flush()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            run = self._client.run_id
            if run is not None and (self._reader.advice(run).advice.observed_step or 0) >= state.global_step:
                time.sleep(0.3)  # The feed polls at most five times a second.
                return
            time.sleep(0.05)


def train(arm: str, seed: int, rate: float, url: str) -> dict[str, Any]:
    """Make a run, and return its rewards and rates."""
    mode: Literal["apply", "shadow"] = "apply" if arm == "remedy" else "shadow"
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(
            Path(folder), steps=STEPS, use_vllm=False, reward=reward_of_turns, learning_rate=rate, seed=seed,
            lr_scheduler_type="constant", per_device_train_batch_size=32, num_generations=8,
            max_completion_length=LENGTH, temperature=1.0, disable_tqdm=True,
        )  # fmt: skip
        client = Client(url, run_key=f"{arm}-{rate:g}-{seed}")
        with client, Reader(url) as reader:
            trainer.add_callback(ForeshockCallback(trainer, advice_mode=mode, correction_mode=mode, client=client))
            trainer.add_callback(Slow(client, reader))
            trainer.train()
    log = [each for each in trainer.state.log_history if "reward" in each]
    rewards = [float(each["reward"]) for each in log]
    return {
        "arm": arm, "seed": seed, "rate": rate, "rewards": rewards,
        "scales": [each["learning_rate"] / rate for each in log],
        "collapse": collapse_step(range(1, len(rewards) + 1), rewards, 0.0),
    }  # fmt: skip


def main() -> int:
    """Make the missing runs, and print the table."""
    seeds = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("SEEDS", "6")))
    KEPT.parent.mkdir(exist_ok=True)
    made = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    known = {(each["arm"], each["seed"]): each for each in made}
    missing = [(arm, seed) for seed in seeds for arm in ARMS if (arm, seed) not in known]
    if missing:
        with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as url, KEPT.open("a") as file:
            for arm, seed in missing:
                known[arm, seed] = train(arm, seed, RATE, url)
                print(json.dumps(known[arm, seed]), file=file, flush=True)
    for arm in ARMS:
        runs = [known[arm, seed] for seed in seeds]
        last = [float(np.mean(each["rewards"][-STEPS // 5 :])) for each in runs]
        collapsed = sum(each["collapse"] is not None for each in runs)
        scale = float(np.mean([each["scales"] for each in runs]))
        print(f"{arm:10s} reward {np.mean(last):.3f} ({min(last):.3f} to {max(last):.3f}), collapses {collapsed} of "
              f"{len(runs)}, mean scale {scale:.0%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
