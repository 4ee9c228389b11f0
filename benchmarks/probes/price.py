"""What a replay costs, in units of what the sampling of the same tokens cost: `r` of docs/large-runs.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.probes.speed import cpu_seconds
from benchmarks.probes.workload import make_rollouts, save_model
from benchmarks.replay import Replayer
from foreshock.scorers import ENGINE_REPLAY, TRAINER_REPLAY
from foreshock_probes.engines.process import EnginePool, process_variables
from foreshock_probes.scorers.tokens import sequence, sequence_lengths
from foreshock_probes.scorers.vllm_engine import VllmOptions, engine_arguments

__all__ = ["Price", "measure_price"]

VOCABULARY, HIDDEN, LAYERS = 32_768, 1024, 4
TOKENS = 12_000
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Price:
    """CPU seconds of sampling the responses and of replaying them by each scorer, and the median ratios `r`."""

    tokens: int
    sampling: float
    scoring: dict[str, float]
    ratios: dict[str, float]

    def __str__(self) -> str:
        lines = [
            f"{name:<16}{seconds:>7.1f} CPU s to score what took {self.sampling:.1f} to sample "
            f"({self.tokens:,} response tokens): r = {self.ratios[name]:.2f}"
            for name, seconds in self.scoring.items()
        ]
        return "\n".join(lines)


def measure_price(folder: Path) -> Price:
    """Sample responses of given lengths with vLLM, as a run does, and replay them as a worker does, in turns."""
    os.environ.update(process_variables())
    from vllm import LLM, SamplingParams, TokensPrompt

    weights = save_model(folder / "price", VOCABULARY, HIDDEN, LAYERS)
    rollouts = make_rollouts(VOCABULARY, TOKENS)
    responses = np.diff(rollouts.response_offsets)
    prompts = [
        TokensPrompt(prompt_token_ids=sequence(rollouts, row).tolist()[: -int(length)])
        for row, length in enumerate(responses)
    ]
    parameters = [
        SamplingParams(max_tokens=int(length), logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True)
        for length in responses
    ]
    engine = LLM(**engine_arguments(weights, VllmOptions(), int(sequence_lengths(rollouts).max()) + 1))
    pool = EnginePool(folder)
    try:
        replay = Replayer(folder, pool)
        work: dict[str, Callable[[], object]] = {
            "sampling": lambda: engine.generate(prompts, parameters, use_tqdm=False)
        }
        work |= {
            name: lambda name=name: replay.score(rollouts, weights, name)  # type: ignore[misc]
            for name in (ENGINE_REPLAY, TRAINER_REPLAY)
        }
        for function in work.values():
            function()
        taken: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(REPEATS):
            for name, function in work.items():
                start = cpu_seconds()
                function()
                taken[name].append(cpu_seconds() - start)
    finally:
        pool.close()
    sampling = taken.pop("sampling")
    return Price(
        int(responses.sum()),
        median(sampling),
        {name: median(seconds) for name, seconds in taken.items()},
        {name: median(np.divide(seconds, sampling).tolist()) for name, seconds in taken.items()},
    )
