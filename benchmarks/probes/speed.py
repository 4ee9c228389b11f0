"""Tokens per second of CPU time, of the scorers and of the bare engines.

CPU time is that of all threads of the processes that score, so that other work on the machine does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.probes.workload import make_rollouts, save_model
from benchmarks.replay import Replayer
from foreshock.digests import weights_digest
from foreshock.rollouts import RolloutBatch
from foreshock.scorers import ENGINE_REPLAY, REFERENCE, SCORERS
from foreshock_probes.engines.process import EnginePool, process_variables
from foreshock_probes.scorers.forward_pass import TokenBatch, load_model
from foreshock_probes.scorers.request import ScoreRequest, WarmModel
from foreshock_probes.scorers.table import scorer_named
from foreshock_probes.scorers.tokens import Composition, compose, sequence, sequence_lengths
from foreshock_probes.scorers.torch_forward import ForwardOptions, plan_of
from foreshock_probes.scorers.vllm_engine import VllmOptions, engine_arguments

__all__ = ["Comparison", "cpu_seconds", "measure_torch", "measure_vllm"]

REPEATS = 5
VOCABULARY, HIDDEN, LAYERS = 32_768, 1024, 4
TOKENS = 3_000
# Torch's scorers that have no place in the chain: all in one dtype.
DTYPES = {REFERENCE: torch.float32} | {
    name: torch.bfloat16 for name, scorer in SCORERS.items() if scorer.engine == "torch" and name.endswith("bfloat16")
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A scorer and the bare engine: tokens per CPU second (medians), the median ratio, the share of padding."""

    name: str
    scored: float
    bare: float
    ratio: float
    padding: float | None = None

    def __str__(self) -> str:
        padding = "" if self.padding is None else f", padding {self.padding:.1%}"
        return (
            f"{self.name:<16}{self.scored:>9,.0f} tokens per CPU s scored, {self.bare:>9,.0f} bare: "
            f"{self.ratio:.1%}{padding}"
        )


def compare(
    name: str,
    tokens: int,
    scored: Callable[[], Any],
    bare: Callable[[], Any],
    clock: Callable[[], float] = time.process_time,
) -> Comparison:
    """Run both once to warm up, then in turns; the one that is first changes from turn to turn.

    `clock` returns the CPU seconds so far of all processes that take part.
    """
    bare()
    scored()
    pairs = []
    for turn in range(REPEATS):
        seconds = {}
        for function in (scored, bare) if turn % 2 else (bare, scored):
            start = clock()
            function()
            seconds[function] = clock() - start
        pairs.append((seconds[scored], seconds[bare]))
    return Comparison(
        name,
        tokens / median(mine for mine, _ in pairs),
        tokens / median(theirs for _, theirs in pairs),
        median(theirs / mine for mine, theirs in pairs),
    )


def measure_torch(folder: Path) -> Iterator[Comparison]:
    """Compare torch's scorers of one dtype with the model's forward pass, which computes the logits of all positions.

    Both run in this process. The bare pass gets its tensors ready, and drops the logits of each batch.
    """
    weights = save_model(folder / "torch", VOCABULARY, HIDDEN, LAYERS)
    rollouts = make_rollouts(VOCABULARY, TOKENS)
    device = torch.device("cpu")
    for name, dtype in DTYPES.items():
        request = ScoreRequest(name, "", rollouts, weights, weights_digest(weights))
        plan = plan_of(request, ForwardOptions())
        batches = [TokenBatch(rollouts, rows, "right", device) for rows in plan.batches]
        model, warm, function = load_model(weights, dtype, "sdpa", device), WarmModel(), scorer_named(name).load()

        def bare(batches: list[TokenBatch] = batches, model: Any = model) -> None:
            with torch.no_grad():
                for batch in batches:
                    model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)

        def scored(function: Any = function, request: ScoreRequest = request, warm: WarmModel = warm) -> None:
            function(request, warm, lambda tokens: None)

        found = compare(name, int(sequence_lengths(rollouts).sum()), scored, bare)
        yield Comparison(found.name, found.scored, found.bare, found.ratio, padding_of(rollouts, plan))


def padding_of(rollouts: RolloutBatch, plan: Composition) -> float:
    """Return the share of padding among the tokens of all batches."""
    lengths = sequence_lengths(rollouts)
    padded = sum(int(lengths[rows].max()) * rows.size for rows in plan.batches)
    return 1 - int(lengths.sum()) / padded


def measure_vllm(folder: Path) -> Comparison:
    """Compare the engine's replay with bare `LLM.generate` in this process, with the same arguments and batches.

    The replay includes what a worker does for it: writing and reading Parquet files, and the pipe to its engine.
    """
    os.environ.update(process_variables())
    from vllm import LLM, SamplingParams, TokensPrompt

    weights = save_model(folder / "vllm", VOCABULARY, HIDDEN, LAYERS)
    rollouts = make_rollouts(VOCABULARY, TOKENS)
    lengths = sequence_lengths(rollouts)
    plan = compose(lengths, VllmOptions().batch_size, "")
    engine = LLM(**engine_arguments(weights, VllmOptions(), int(lengths.max())))
    parameters = SamplingParams(
        prompt_logprobs=0, max_tokens=1, flat_logprobs=True, detokenize=False, temperature=0.0, ignore_eos=True
    )
    prompts = [
        [TokensPrompt(prompt_token_ids=sequence(rollouts, row).tolist()) for row in rows] for rows in plan.batches
    ]

    def bare() -> None:
        for batch in prompts:
            engine.generate(batch, parameters, use_tqdm=False)

    pool = EnginePool(folder)
    try:
        replay = Replayer(folder, pool)
        return compare(
            ENGINE_REPLAY,
            int(lengths.sum()),
            lambda: replay.score(rollouts, weights, ENGINE_REPLAY),
            bare,
            cpu_seconds,
        )
    finally:
        pool.close()


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of all that it started, the replay's engine among them."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)
