"""Part `k3` of `make bench-connect`: the figures of each integration's run beside those of the framework itself.

    python -m benchmarks.connect.k3 [--frameworks verl slime trl torch]

Each framework trains in processes of its own as in the tests of the integrations, whose files say what of it is real
(`tests/foreshock/integrations/*_runs.py`), logged to the real service. The largest difference over the steps is shown.
All figures must agree to 1e-6; a framework without k3 is compared by what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import foreshock
from benchmarks.running_service import free_port, running_service
from foreshock.comparisons import TRAINER_ROLLOUT

BAR = 1e-6
STEPS = 3

Figures = list[Mapping[str, float]]


def run(frameworks: Sequence[str] = ()) -> dict[str, float]:
    """Print the table; return the largest difference of k3, and of all figures."""
    chosen = frameworks or tuple(_RUNS)
    print(f"{'framework':11}{'its figure':42}{'ours':28}{'steps':>6}{'largest difference':>20}")
    found = {"k3_difference": 0.0, "k3_frameworks": 0.0, "other_difference": 0.0}
    with tempfile.TemporaryDirectory(prefix="foreshock-k3-") as name, running_service(Path(name)) as url:
        for framework in chosen:
            folder = Path(name) / framework
            folder.mkdir()
            key, figures = _RUNS[framework](url, folder)
            has_k3 = False
            for ours, (theirs, values) in figures.items():
                measured = _measured(url, key, ours)
                if len(measured) != len(values):
                    raise RuntimeError(f"{framework}: {len(values)} steps of {theirs}, {len(measured)} of {ours}")
                difference = float(np.max(np.abs(np.subtract(measured, values))))
                print(f"{framework:11}{theirs:42}{ours:28}{len(values):6}{difference:20.1e}", flush=True)
                is_k3 = ours.startswith("k3_kl")
                has_k3 |= is_k3
                kind = "k3_difference" if is_k3 else "other_difference"
                found[kind] = max(found[kind], difference)
            found["k3_frameworks"] += has_k3
    return found


def reached(found: dict[str, float]) -> bool:
    """Return True if every figure agrees."""
    return found["k3_frameworks"] > 0 and max(found["k3_difference"], found["other_difference"]) < BAR


_Found = tuple[str, dict[str, tuple[str, list[float]]]]
"""The run's key; our measure → (the framework's name, its values by step)."""


def _verl(url: str, folder: Path) -> _Found:
    (log,) = _train("verl_runs", ["rejection", str(STEPS)], _settings(url, folder, "verl"))
    names = {f"rollout_corr/{name}": name for name in ("k3_kl", "log_ppl_diff", "log_ppl_abs_diff")}
    names |= {f"training/{name}": name for name in ("rollout_probs_diff_mean", "rollout_probs_diff_max")}
    return "verl", {ours: (theirs, [step[theirs] for step in log["metrics"]]) for theirs, ours in names.items()}


def _slime(url: str, folder: Path) -> _Found:
    settings = _settings(url, folder, "slime") | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "FORESHOCK_WEIGHTS_ROOT": "weights"
    }  # fmt: skip
    log, _ = _train("slime_runs", ["tools", str(STEPS)], settings, ranks=2)
    return "slime", {
        name: (f"slime's {name}", [step[name] for step in log["figures"]])
        for name in ("k3_kl", "k3_kl_seq_mean", "mean_abs_d")
    }


def _trl(url: str, folder: Path) -> _Found:
    words = [str(folder), "grpo", "vllm", "shadow", str(STEPS), "0"]
    (log,) = _train("trl_runs", words, _settings(url, folder, "trl"))
    steps = [entry for entry in log if "reward" in entry]
    prefix = "sampling/sampling_logp_difference"
    return "trl", {
        ours: (f"{prefix}/{theirs}", [entry[f"{prefix}/{theirs}"] for entry in steps])
        for ours, theirs in (("mean_abs_d", "mean"), ("max_abs_d", "max"))
    }


def _torch(url: str, folder: Path) -> _Found:
    values = []
    with foreshock.Client(url, run_key="torch", spool_directory=folder, strict=True) as client:
        client.start_run(model="none")
        for step in range(STEPS):
            random = np.random.default_rng(step)
            lengths = random.integers(5, 200, 32)
            behaviour = [-random.exponential(0.7, length).astype(np.float32) for length in lengths]
            target = [np.minimum(row + random.normal(0, 0.1, row.size), 0).astype(np.float32) for row in behaviour]
            d = np.concatenate(target).astype(np.float64) - np.concatenate(behaviour)
            values.append(float(np.mean(np.expm1(d) - d)))
            client.log_rollouts(step, {
                "prompt_token_ids": [[1]] * 32,
                "response_token_ids": [random.integers(0, 1000, length) for length in lengths],
                "rollout_log_probs": behaviour,
                "trainer_log_probs": target,
            })  # fmt: skip
        client.flush(120)
    return "torch", {"k3_kl": ("mean(exp(d) - 1 - d) by numpy in float64", values)}


_RUNS: dict[str, Callable[[str, Path], _Found]] = {"torch": _torch, "verl": _verl, "slime": _slime, "trl": _trl}


def _settings(url: str, folder: Path, key: str) -> dict[str, str]:
    return {"FORESHOCK_URL": url, "FORESHOCK_RUN_KEY": key, "FORESHOCK_SPOOL_DIRECTORY": str(folder / "spool")}


def _train(module: str, words: list[str], settings: Mapping[str, str], ranks: int = 1) -> list[Any]:
    """Run the training program in `ranks` processes; return what each printed after LOG."""
    Path(settings["FORESHOCK_SPOOL_DIRECTORY"]).mkdir(exist_ok=True)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.foreshock.integrations.{module}", *words],
            env={**os.environ, **settings, "RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1
            else {**os.environ, **settings},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    ended = [process.communicate(timeout=600) for process in started]
    for process, (_, errors) in zip(started, ended, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"{module} failed: {errors[-2000:]}")
    lines = [next(line for line in output.splitlines() if line.startswith("LOG ")) for output, _ in ended]
    return [json.loads(line.removeprefix("LOG ")) for line in lines]


def _measured(url: str, key: str, measure: str) -> list[float]:
    query = {"comparison": TRAINER_ROLLOUT, "measure": measure}
    answer = httpx.get(f"{url}/v1/runs/{key}/measurements", params=query, timeout=60)
    return list(answer.raise_for_status().json()["columns"][measure])


def main() -> int:
    """Compare the chosen frameworks; return 1 if a figure differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frameworks", nargs="+", choices=tuple(_RUNS), default=tuple(_RUNS))
    found = run(parser.parse_args().frameworks)
    print(*(f"{name}={value:.3g}" for name, value in found.items()), f"passed={reached(found)}")
    return 0 if reached(found) else 1


if __name__ == "__main__":
    sys.exit(main())
