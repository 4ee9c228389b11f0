"""A vLLM engine in this process: start it, load other weights into it, run prompts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock_probes.fingerprints import score_fingerprint
from foreshock_probes.scorers.request import ReloadError, ScoreRequest, UnsupportedScoreError, WarmModel
from foreshock_probes.scorers.sampling import divisors, sampled_temperature
from foreshock_probes.scorers.tokens import check_tokens, sequence_lengths
from foreshock_probes.scorers.vllm_arguments import VllmOptions, bind_ranks_to_cores, engine_arguments
from foreshock_probes.scorers.vllm_weights import reload_and_verify

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

__all__ = ["Prepared", "VllmEngine", "bfloat16_conversion", "prepare_engine"]

T = TypeVar("T")

RECORDED_VARIABLES = ("VLLM_BATCH_INVARIANT", "VLLM_CPU_SGL_KERNEL", "VLLM_USE_V2_MODEL_RUNNER")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A loaded engine, and the divisor [N] of each rollout's logits."""

    engine: VllmEngine
    divisor: NDArray[np.float64]

    def fingerprint(self, request: ScoreRequest, options: VllmOptions, batch_composition: str) -> Fingerprint:
        """Return the fingerprint of what the engine computed for the request."""
        return score_fingerprint(
            request,
            "vllm",
            self.engine.device,
            dtype=options.dtype,
            head_dtype=options.head_dtype or options.dtype,
            attention_backend=self.engine.attention_backend,
            batch_composition=batch_composition,
            temperature=sampled_temperature(self.divisor),
            flags=self.engine.flags(options),
        )


def prepare_engine(request: ScoreRequest, options: VllmOptions, warm: WarmModel) -> Prepared:
    """Start the engine if none is warm, and have it hold the request's weights.

    Raises UnsupportedScoreError, and ReloadError if a warm engine cannot be shown to hold the weights.
    """
    rollouts = request.rollouts
    check_tokens(rollouts, request.weights_folder)
    divisor = divisors(rollouts, options.temperature)
    longest = int(sequence_lengths(rollouts).max(initial=1))
    arguments = engine_arguments(request.weights_folder, options, longest)
    key = repr(sorted((name, value) for name, value in arguments.items() if name != "model"))
    engine = warm.get(key, lambda: VllmEngine(arguments, request.weights_digest))
    engine.hold(request.weights_folder, request.weights_digest)
    return Prepared(engine, divisor)


class VllmEngine:
    """A vLLM engine in this process, started with the weights in the folder `model` of its arguments."""

    def __init__(self, arguments: dict[str, Any], weights_digest: str) -> None:
        from vllm import LLM

        bind_ranks_to_cores(arguments["tensor_parallel_size"])
        try:
            self._llm: LLM = LLM(**arguments)
        except (ValueError, NotImplementedError, ImportError) as error:
            raise UnsupportedScoreError(f"vLLM cannot load the checkpoint: {error}") from error
        self._in_process = arguments["tensor_parallel_size"] == 1
        self._divisor = 1.0
        self._held: str | None = weights_digest
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.attention_backend = self._find_attention_backend()

    def prefill(self, tokens: list[NDArray[np.int32]]) -> list[RequestOutput]:
        """Return an output with flat `prompt_logprobs` for each sequence of `tokens`."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            prompt_logprobs=0, max_tokens=1, flat_logprobs=True, detokenize=False, temperature=0.0, ignore_eos=True
        )
        return self.generate(tokens, [parameters] * len(tokens))

    def generate(self, prompts: list[NDArray[np.int32]], parameters: list[SamplingParams]) -> list[RequestOutput]:
        """Return the output of each prompt under its own parameters."""
        from vllm import TokensPrompt

        if not prompts:
            return []
        made = [TokensPrompt(prompt_token_ids=row.tolist()) for row in prompts]
        outputs: list[RequestOutput] = self._llm.generate(made, parameters, use_tqdm=False)
        return outputs

    def hold(self, folder: Path, digest: str) -> None:
        """Hold the weights of `digest` in `folder`: load them in place of the present ones if these differ.

        The weights must have the same architecture. Raises ReloadError if the engine cannot be shown to hold every
        tensor of the checkpoint; it then holds unknown weights, until a later call succeeds.
        """
        if self._held == digest:
            return
        self._held = None
        if not self._in_process:
            raise ReloadError("the model is in other processes (tensor_parallel_size > 1), where it cannot be read")
        reload_and_verify(self._llm, folder)
        self._held = digest

    def divide_logits_by(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on, in float32, as vLLM's own sampler does."""
        if temperature != self._divisor:
            self._llm.collective_rpc("foreshock_divide_logits_by", args=(temperature,))
            self._divisor = temperature

    def apply(self, function: Callable[[Any], T]) -> T:
        """Return `function(model)`; the model must be in this process (tensor_parallel_size=1)."""
        found: T = self._llm.apply_model(function)[0]
        return found

    @property
    def step_limits(self) -> tuple[int, int]:
        """The most sequences and the most tokens of one step of the scheduler."""
        scheduler = self._llm.llm_engine.vllm_config.scheduler_config
        return scheduler.max_num_seqs, scheduler.max_num_batched_tokens

    def flags(self, options: VllmOptions) -> dict[str, str]:
        """Return the flags of the fingerprint that are needed to set up the same engine."""
        flags = {
            "enforce_eager": str(options.enforce_eager).lower(),
            "prefix_caching": str(options.prefix_caching).lower(),
            "kv_cache_dtype": options.kv_cache_dtype,
            "tensor_parallel_size": str(options.tensor_parallel_size),
            "max_num_batched_tokens": str(self.step_limits[1]),
        }
        chosen = {"chunked_prefill": options.chunked_prefill, "cascade_attention": options.cascade_attention}
        flags |= {name: str(value).lower() for name, value in chosen.items() if value is not None}
        flags |= {name: value for name, value in os.environ.items() if name in RECORDED_VARIABLES}
        conversion = bfloat16_conversion() if self.device.type == "cpu" and options.dtype == "bfloat16" else None
        return flags | ({"bfloat16_conversion": conversion} if conversion else {})

    def _find_attention_backend(self) -> str | None:
        """Return the name of vLLM's attention backend, several joined by "+"; None if no layer names one."""
        names = {name for names in self._llm.collective_rpc("foreshock_attention_backends") for name in names}
        return "+".join(sorted(names)) or None


def bfloat16_conversion() -> str | None:
    """Return how vLLM's CPU kernels convert float32 to bfloat16 here: "nearest", "truncated", None if unknown.

    Kernels built for CPUs without AVX512-BF16 truncate, which biases every activation towards zero and changes
    log-probs by as much as a whole training–inference mismatch.
    """
    operation = getattr(getattr(torch.ops, "_C", None), "rms_norm", None)
    if operation is None:
        return None
    row = torch.linspace(-3, 3, 128, dtype=torch.bfloat16)[None]
    given = torch.empty_like(row)
    try:
        operation(given, row, torch.ones(128, dtype=torch.bfloat16), 1e-6)
    except (RuntimeError, TypeError):
        return None
    wide = row.float()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    cut = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)
    agreement = {"nearest": (given == exact.to(torch.bfloat16)), "truncated": (given == cut)}
    shares = {name: float(equal.float().mean()) for name, equal in agreement.items()}
    best = max(shares, key=lambda name: shares[name])
    return best if shares[best] > 0.95 else None
