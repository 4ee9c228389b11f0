"""SGLang as an engine: exactness, throughput, two checkpoints through one server, and its faults, on this CPU.

    make bench-engines

A server is started on a tiny model in float32. `sglang.http` must equal `torch.float32` within 5e-5, also with a
checkpoint that the server has loaded in place, and `sglang.decode` must equal the log-probs that SGLang logged, bit for
bit. A forced decode must reach 0.85 of the tokens per second at which the server samples. The doctor must name each of
the faults of `sglang_faults`, and nothing else.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.bars import Line, report
from benchmarks.sglang_faults import FAULTS, judged
from examples.tiny_rl.sglang_sampler import running_sglang
from foreshock.digests import weights_digest
from foreshock.rollouts import RolloutBatch
from foreshock.scorers import REFERENCE, SCORERS
from foreshock_probes.offers import load_scorer
from foreshock_probes.scorers import sglang_http
from foreshock_probes.scorers.request import Scored, ScoreRequest, WarmModel

PREFILL, DECODE = (
    next(name for name, scorer in SCORERS.items() if scorer.implementation == f"{sglang_http.__name__}:{function}")
    for function in ("score_prefill", "score_decode")
)
ROLLOUTS, TOKENS, PAIRS = 32, 96, 9
LARGEST_DIFFERENCE, LEAST_THROUGHPUT = 5e-5, 0.85


def sample(
    server: httpx.Client, prompts: list[list[int]], tokens: int, temperature: float = 1.0, **columns: Any
) -> RolloutBatch:
    """Return rollouts of `tokens` tokens that SGLang sampled, with the log-probs that it reported."""
    # For a prompt in the cache, SGLang would recompute only parts, and other parts each time.
    server.post("/flush_cache?timeout=60").raise_for_status()
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
    }
    answers = server.post("/generate", json=body).raise_for_status().json()
    server.post("/flush_cache?timeout=60").raise_for_status()
    return RolloutBatch.from_lists(
        [str(number) for number in range(len(prompts))],
        prompts,
        [answer["output_ids"] for answer in answers],
        rollout_log_probs=[[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers],
        **columns,
    )


def _score(scorer: str, folder: Path, rollouts: RolloutBatch) -> Scored:
    request = ScoreRequest(scorer, "", rollouts, folder, weights_digest(folder))
    return load_scorer(scorer)(request, WarmModel(), lambda _: None)


def main() -> int:
    """Measure and print; return 1 below a bar."""
    from tests.probes.tiny import VOCABULARY, save_checkpoint

    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCABULARY, random.integers(2, 9)).tolist() for _ in range(ROLLOUTS)]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        folders = [save_checkpoint(root / f"step_{step}", seed=step) for step in range(2)]
        with running_sglang(folders[0], root / "server.log") as server:
            os.environ |= {
                "FORESHOCK_ENGINE_SERVERS": f"sglang={server.base_url}",
                "FORESHOCK_ENGINE_SERVERS_RELOAD": "sglang",
            }
            rollouts = sample(server, prompts, TOKENS)
            found["prefill_difference"] = max(
                float(
                    np.abs(
                        _score(PREFILL, each, rollouts).log_probs - _score(REFERENCE, each, rollouts).log_probs
                    ).max()
                )
                for each in folders
            )
            _score(DECODE, folders[0], rollouts)
            ratios = []
            for _ in range(PAIRS):
                began = time.monotonic()
                sample(server, prompts, TOKENS)
                sampled = time.monotonic()
                _score(DECODE, folders[0], rollouts)
                ratios.append((sampled - began) / (time.monotonic() - sampled))
            found["throughput_ratio"] = statistics.median(ratios)
            # One sequence alone: the server's batches depend on the time of arrival, and the last bits on the batch.
            alone = sample(server, prompts[:1], TOKENS)
            decoded, logged = _score(DECODE, folders[0], alone), np.asarray(alone.rollout_log_probs)
            found["decode_difference"] = float(np.abs(decoded.log_probs - logged).max())
        named = false = 0
        for fault, causes in judged(root):
            named += fault.cause in causes
            false += any(cause != fault.cause for cause in causes)
            print(f"{fault.name:50} the doctor names: {', '.join(causes) or 'nothing'}", flush=True)
        found |= {"doctor_named": named, "doctor_false": false}
    rows = (
        (f"largest |d|, {PREFILL} and {REFERENCE}", "prefill_difference", LARGEST_DIFFERENCE, False),
        (f"largest |d|, {DECODE} and the logged", "decode_difference", 0.0, False),
        ("tokens/s, forced decode over sampling", "throughput_ratio", LEAST_THROUGHPUT, True),
        ("faults of the server that the doctor names", "doctor_named", sum(bool(each.cause) for each in FAULTS), True),
        ("cases with a false name", "doctor_false", 0, False),
    )
    return report([Line(name, title, found[name], bar, at_least) for title, name, bar, at_least in rows])


if __name__ == "__main__":
    sys.exit(main())
