"""The inference engine: vLLM on CPU, in this process, in bfloat16. It samples and logs μ, and it takes new weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from examples.tiny_rl.model import MAX_POSITIONS
from examples.tiny_rl.task import END_OF_SEQUENCE, MAX_RESPONSE_TOKENS


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response, including its end-of-sequence token."""

    token_ids: list[int]
    log_probs: list[float]
    """log μ of each token as it was sampled, in nats."""
    finish_reason: str
    """`stop` if the model ended it, `length` if it reached the cap."""


class Samples(Protocol):
    """What the loop asks of an engine: `Sampler`, or `SglangSampler`."""

    engine: str
    version: str

    def sample(
        self, prompts: Sequence[Sequence[int]], responses_per_prompt: int, max_tokens: int = MAX_RESPONSE_TOKENS
    ) -> list[list[Response]]: ...

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[float]: ...

    def reload(self, folder: Path) -> None: ...


def logprobs_mode(temperature: float) -> Literal["raw_logprobs", "processed_logprobs"]:
    """Return the mode of the engine whose log-probs are those of the sampling distribution; at 1 both modes agree."""
    return "raw_logprobs" if temperature == 1.0 else "processed_logprobs"


class Sampler:
    """vLLM with one model loaded. Its log-probs are those of the sampling distribution, without truncation."""

    engine = "vllm"

    def __init__(self, folder: Path, seed: int, kv_cache_dtype: str = "auto", temperature: float = 1.0) -> None:
        # vLLM reads these at import: the engine runs in this process, and its cache stays small.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm

        self._vllm = vllm
        self._temperature = temperature
        self.version = str(vllm.__version__)
        self._engine: Any = vllm.LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            generation_config="vllm",
            max_model_len=MAX_POSITIONS,
            max_num_seqs=128,
            logprobs_mode=logprobs_mode(temperature),
            seed=seed,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )

    def sample(
        self, prompts: Sequence[Sequence[int]], responses_per_prompt: int, max_tokens: int = MAX_RESPONSE_TOKENS
    ) -> list[list[Response]]:
        """Return `responses_per_prompt` independent responses of at most `max_tokens` tokens to each prompt."""
        parameters = self._vllm.SamplingParams(
            n=responses_per_prompt,
            temperature=self._temperature,
            max_tokens=max_tokens,
            stop_token_ids=[END_OF_SEQUENCE],
            logprobs=0,
            detokenize=False,
        )
        outputs = self._engine.generate(self._as_prompts(prompts), parameters, use_tqdm=False)
        return [
            [
                Response(
                    token_ids=list(completion.token_ids),
                    log_probs=[
                        entry[token_id].logprob
                        for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
                    ],
                    finish_reason=str(completion.finish_reason),
                )
                for completion in output.outputs
            ]
            for output in outputs
        ]

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[float]:
        """Return log-probabilities of given responses by prefill, flat in the order of the responses."""
        sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        parameters = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._engine.generate(self._as_prompts(sequences), parameters, use_tqdm=False)
        return [
            output.prompt_logprobs[position][sequence[position]].logprob
            for prompt, sequence, output in zip(prompts, sequences, outputs, strict=True)
            for position in range(len(prompt), len(sequence))
        ]

    def reload(self, folder: Path) -> None:
        """Load the weights of a checkpoint folder. `reload_check` verifies that they arrived."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load weights from memory, by their names in a checkpoint. The caller verifies that they arrived."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})

    def _as_prompts(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        return [self._vllm.TokensPrompt(prompt_token_ids=list(sequence)) for sequence in sequences]
