"""`vllm.prefill`: the log-probs of vLLM's prefill, with prompt and response passed as one prompt.

These are the engine's own numerics (kernels, dtype, head) without the state of sampling: compared with `rollout` they
show the effect of decoding, caches and stale weights, compared with `torch.trainer` that of engine against trainer.

Prefix caching is off, the mode is eager, and no tokenizer is loaded. vLLM materialises [tokens, vocabulary] for prompt
log-probs, so `logits_bytes` bounds the tokens of one engine step. vLLM's prompt log-probs are always raw; a temperature
is applied to the logits that the model returns. Multimodal prompts, LoRA adapters, and log-probs under top-p, top-k or
min-p are not covered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from foreshock.fingerprint import Fingerprint
from probes.fingerprints import score_fingerprint
from probes.scorers.composition import compose
from probes.scorers.request import (
    Options,
    Report,
    Scored,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    parse_options,
)
from probes.scorers.sampling import divisors, sampled_temperature
from probes.scorers.tokens import (
    check_tokens,
    model_configuration,
    sequence,
    sequence_lengths,
    vocabulary_size,
)

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

__all__ = [
    "Prefill",
    "PrefillEngine",
    "PrefillOptions",
    "engine_arguments",
    "prepare_prefill",
    "prompt_log_probs",
    "score",
]

T = TypeVar("T")

BYTES_PER_LOGIT = 10  # 2 as computed, 4 as float32, 4 of log-softmax
DEFAULT_LOGITS_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
# vLLM's default for a step is at most this many tokens; a larger bound has no effect.
LARGEST_DEFAULT_STEP = 16_384
SHORTEST_MODEL_LENGTH = 256
RECORDED_VARIABLES = ("VLLM_BATCH_INVARIANT", "VLLM_CPU_SGL_KERNEL", "VLLM_USE_V2_MODEL_RUNNER")


class PrefillOptions(Options):
    """The engine's settings. `batch_size` rows are submitted together; the engine's scheduler packs them into steps.

    `temperature` divides the logits instead of the batch's temperature. The others are vLLM's arguments of the same
    name; None: vLLM's default.
    """

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    head_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None
    tensor_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.8, gt=0, le=1)
    batch_size: int = Field(default=128, ge=1)
    temperature: float | None = Field(default=None, gt=0)
    logits_bytes: int | None = Field(default=None, ge=1)


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request. Raises UnsupportedScoreError if that cannot be done correctly."""
    options = parse_options(PrefillOptions, request)
    rollouts = request.rollouts
    prefill = prepare_prefill(request, options, warm)
    engine, lengths, divisor = prefill.engine, sequence_lengths(rollouts), prefill.divisor
    plan = compose(lengths, options.batch_size, request.variant)
    log_probs = np.full(rollouts.num_tokens, np.nan, dtype=np.float32)
    done = 0
    for rows in plan.batches:
        for temperature in np.unique(divisor[rows]):
            chosen = rows[divisor[rows] == temperature]
            chosen = chosen[lengths[chosen] >= 2]  # a single token has no log-prob
            engine.divide_logits_by(float(temperature))
            outputs = engine.prefill([sequence(rollouts, int(row)) for row in chosen])
            for row, output in zip(chosen.tolist(), outputs, strict=True):
                done += _write(output, rollouts.prompt_offsets, rollouts.response_offsets, row, log_probs)
        report(done)
    return Scored(log_probs=log_probs, fingerprint=prefill.fingerprint(request, options, plan.name))


@dataclass(frozen=True, slots=True)
class Prefill:
    """A loaded engine, and the divisor [N] of each rollout's logits."""

    engine: PrefillEngine
    divisor: NDArray[np.float64]

    def fingerprint(self, request: ScoreRequest, options: PrefillOptions, batch_composition: str) -> Fingerprint:
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


def prepare_prefill(request: ScoreRequest, options: PrefillOptions, warm: WarmModel) -> Prefill:
    """Load the engine, if it is not warm, or weights into a warm one. Raises UnsupportedScoreError."""
    rollouts = request.rollouts
    check_tokens(rollouts, request.weights_folder)
    divisor = divisors(rollouts, options.temperature)
    longest = int(sequence_lengths(rollouts).max(initial=1))
    arguments = engine_arguments(request.engine_folder or request.weights_folder, options, longest)
    engine = warm.get(repr(sorted(arguments.items())), lambda: PrefillEngine(arguments))
    if request.engine_folder is not None:
        engine.load_in_place(request.weights_folder)
    return Prefill(engine, divisor)


def engine_arguments(weights_folder: Path, options: PrefillOptions, longest: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for sequences of at most `longest` tokens; other arguments, other engine."""
    # Room for the one generated token, rounded up so that the next job's rollouts fit the same warm engine.
    length = max(SHORTEST_MODEL_LENGTH, 1 << longest.bit_length())
    longest_allowed = _longest_position(weights_folder)
    if longest_allowed is not None:
        length = max(min(length, longest_allowed), longest + 1)
    arguments: dict[str, Any] = {
        "model": str(weights_folder),
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": length,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "load_format": "safetensors",
        "generation_config": "vllm",
        "trust_remote_code": False,
        "seed": 0,
    }
    if options.head_dtype:
        arguments["hf_overrides"] = {"head_dtype": options.head_dtype}
    if options.attention_backend:
        arguments["attention_backend"] = options.attention_backend
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    bound = (options.logits_bytes or DEFAULT_LOGITS_BYTES[kind]) // (
        BYTES_PER_LOGIT * (vocabulary_size(weights_folder) or 1)
    )
    if bound < LARGEST_DEFAULT_STEP:
        tokens = max(int(bound), 16)
        arguments |= {"max_num_batched_tokens": tokens, "max_num_seqs": min(tokens, 128)}
        arguments |= {"enable_chunked_prefill": True}
    return arguments


class PrefillEngine:
    """A loaded vLLM engine in this process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        try:
            self._llm: LLM = LLM(**arguments)
        except (ValueError, NotImplementedError, ImportError) as error:
            raise UnsupportedScoreError(f"vLLM cannot load the checkpoint: {error}") from error
        self._in_process = arguments["tensor_parallel_size"] == 1
        self._divisor = 1.0
        self._patched = False
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.attention_backend = self._find_attention_backend()

    def prefill(self, tokens: list[NDArray[np.int32]]) -> list[RequestOutput]:
        """Return an output with flat `prompt_logprobs` for each sequence of `tokens`."""
        from vllm import SamplingParams, TokensPrompt

        if not tokens:
            return []
        parameters = SamplingParams(
            prompt_logprobs=0, max_tokens=1, flat_logprobs=True, detokenize=False, temperature=1.0, ignore_eos=True
        )
        prompts = [TokensPrompt(prompt_token_ids=row.tolist()) for row in tokens]
        outputs: list[RequestOutput] = self._llm.generate(prompts, parameters, use_tqdm=False)
        return outputs

    def load_in_place(self, folder: Path) -> None:
        """Load the weights in `folder` in place of the present ones, in milliseconds with a tiny model.

        The model must have the same architecture and no tied embeddings: on a CPU a tied head keeps the old weights.
        With an untied one the result equals that of an engine started with the weights, bit for bit.
        """
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    def divide_logits_by(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on, in float32, as vLLM's own sampler does."""
        self._divisor = temperature
        if temperature == 1.0 or self._patched:
            return
        if not self._in_process:
            raise UnsupportedScoreError("vllm.prefill at a temperature other than 1 needs tensor_parallel_size=1")

        def patch(model: Any) -> None:
            plain = model.compute_logits

            def compute_logits(*arguments: Any, **named: Any) -> Any:
                logits = plain(*arguments, **named)
                return logits if self._divisor == 1.0 or logits is None else logits.float() / self._divisor

            model.compute_logits = compute_logits

        self.apply(patch)
        self._patched = True

    def apply(self, function: Callable[[Any], T]) -> T:
        """Return `function(model)`; the model must be in this process (tensor_parallel_size=1)."""
        found: T = self._llm.apply_model(function)[0]
        return found

    def flags(self, options: PrefillOptions) -> dict[str, str]:
        """Return the flags of the fingerprint that are needed to set up the same engine."""
        flags = {
            "enforce_eager": "true",
            "prefix_caching": "false",
            "kv_cache_dtype": options.kv_cache_dtype,
            "tensor_parallel_size": str(options.tensor_parallel_size),
            "max_num_batched_tokens": str(self._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens),
        }
        flags |= {name: value for name, value in os.environ.items() if name in RECORDED_VARIABLES}
        conversion = bfloat16_conversion() if self.device.type == "cpu" and options.dtype == "bfloat16" else None
        return flags | ({"bfloat16_conversion": conversion} if conversion else {})

    def _find_attention_backend(self) -> str | None:
        """Return the name of vLLM's attention backend, None if the model is in another process."""
        if not self._in_process:
            return None

        def ask(model: Any) -> set[str]:
            backends = (getattr(module, "attn_backend", None) for module in model.modules())
            return {backend.get_name() for backend in backends if backend is not None}

        return "+".join(sorted(self.apply(ask))) or None


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


def _longest_position(weights_folder: Path) -> int | None:
    value = model_configuration(weights_folder).get("max_position_embeddings")
    return value if isinstance(value, int) else None


def _write(
    output: RequestOutput,
    prompt_offsets: NDArray[np.int64],
    response_offsets: NDArray[np.int64],
    row: int,
    into: NDArray[np.float32],
) -> int:
    """Copy the response's log-probs of `row` to their place in `into`; return the number of response tokens."""
    prompt = int(prompt_offsets[row + 1] - prompt_offsets[row])
    start, stop = int(response_offsets[row]), int(response_offsets[row + 1])
    skipped = 1 if prompt == 0 else 0
    into[start + skipped : stop] = prompt_log_probs(output, prompt + skipped)
    return stop - start


def prompt_log_probs(output: RequestOutput, first: int) -> NDArray[np.float64]:
    """Return the log-probs, in nats, of a sequence's tokens from the position `first` ≥ 1 on."""
    flat: Any = output.prompt_logprobs
    at = np.asarray(flat.start_indices[first:], dtype=np.int64)
    return np.asarray(flat.logprobs, dtype=np.float64)[at]
