"""`vllm.prefill`: what vLLM's prefill gives each response token, prompt and response handed in as one prompt.

This is the engine's own numerics (kernels, dtype, head) without the sampling-time state: against `rollout` it shows
what decoding, caches and stale weights did; against `torch.trainer` what engine and trainer compute differently.

Nothing is cached between prompts (prefix caching off), nothing is compiled (eager), and no tokenizer is loaded. vLLM
materialises [tokens, vocabulary] for prompt log-probs, so the tokens of one engine step are bounded by `logits_bytes`.
Prompt log-probs are always raw: a temperature is applied to the logits where the model gives them to the sampler.
What it does not cover: multimodal prompts, LoRA adapters, and log-probs under top-p, top-k or min-p.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

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

__all__ = ["PrefillEngine", "PrefillOptions", "engine_arguments", "prompt_log_probs", "score"]

T = TypeVar("T")

BYTES_PER_LOGIT = 10  # two as computed, four as float32, four as log-softmax
DEFAULT_LOGITS_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
# vLLM's own default for a step is at most this many tokens; a larger bound changes nothing.
LARGEST_DEFAULT_STEP = 16_384
SHORTEST_MODEL_LENGTH = 256
RECORDED_VARIABLES = ("VLLM_BATCH_INVARIANT", "VLLM_CPU_SGL_KERNEL", "VLLM_USE_V2_MODEL_RUNNER")


class PrefillOptions(Options):
    """The engine's settings. `batch_size` rows are submitted together; the engine's scheduler packs them into steps.

    `temperature` divides the logits, whatever the batch says of its sampling. The rest are vLLM's arguments of the same
    name; None leaves vLLM's default.
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
    """Score all response tokens of the request. Raises UnsupportedScoreError where that cannot be done truthfully."""
    options = parse_options(PrefillOptions, request)
    rollouts = request.rollouts
    check_tokens(rollouts, request.weights_folder)
    divisor = divisors(rollouts, options.temperature)
    lengths = sequence_lengths(rollouts)
    plan = compose(lengths, options.batch_size, request.variant)
    arguments = engine_arguments(request.weights_folder, options, int(lengths.max(initial=1)))
    engine = warm.get(repr(sorted(arguments.items())), lambda: PrefillEngine(arguments))
    log_probs = np.full(rollouts.num_tokens, np.nan, dtype=np.float32)
    done = 0
    for rows in plan.batches:
        for temperature in np.unique(divisor[rows]):
            chosen = rows[divisor[rows] == temperature]
            chosen = chosen[lengths[chosen] >= 2]  # one token alone has nothing to be predicted from
            engine.divide_logits_by(float(temperature))
            outputs = engine.prefill([sequence(rollouts, int(row)) for row in chosen])
            for row, output in zip(chosen.tolist(), outputs, strict=True):
                done += _write(output, rollouts.prompt_offsets, rollouts.response_offsets, row, log_probs)
        report(done)
    fingerprint = score_fingerprint(
        request,
        "vllm",
        engine.device,
        dtype=options.dtype,
        head_dtype=options.head_dtype or options.dtype,
        attention_backend=engine.attention_backend,
        batch_composition=plan.name,
        temperature=sampled_temperature(divisor),
        flags=engine.flags(options),
    )
    return Scored(log_probs=log_probs, fingerprint=fingerprint)


def engine_arguments(weights_folder: Path, options: PrefillOptions, longest: int) -> dict[str, Any]:
    """What `vllm.LLM` is called with for sequences of at most `longest` tokens: all that, when it changes, needs
    another engine."""
    # One token has to be generated. Rounded up, so that the next job's rollouts fit the same warm engine.
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
        """One output for each sequence of `tokens`, its `prompt_logprobs` flat."""
        from vllm import SamplingParams, TokensPrompt

        if not tokens:
            return []
        parameters = SamplingParams(
            prompt_logprobs=0, max_tokens=1, flat_logprobs=True, detokenize=False, temperature=1.0, ignore_eos=True
        )
        prompts = [TokensPrompt(prompt_token_ids=row.tolist()) for row in tokens]
        outputs: list[RequestOutput] = self._llm.generate(prompts, parameters, use_tqdm=False)
        return outputs

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
        """What `function` gives for the model, which has to be in this process."""
        found: T = self._llm.apply_model(function)[0]
        return found

    def flags(self, options: PrefillOptions) -> dict[str, str]:
        """What a reader of the fingerprint needs to set up the same engine."""
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
        """The name of the backend that vLLM chose for attention, None where it cannot be asked."""
        if not self._in_process:
            return None

        def ask(model: Any) -> set[str]:
            backends = (getattr(module, "attn_backend", None) for module in model.modules())
            return {backend.get_name() for backend in backends if backend is not None}

        return "+".join(sorted(self.apply(ask))) or None


def bfloat16_conversion() -> str | None:
    """How vLLM's CPU kernels turn float32 into bfloat16 on this machine: "nearest", "truncated", else None.

    Kernels built for CPUs without AVX512-BF16 cut the low bits off, which biases every activation towards zero and
    moves log-probs by as much as a whole training-inference mismatch. So it belongs in the fingerprint.
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
    """Copy the response's part of the prompt log-probs of `row` to its place; the number of response tokens."""
    prompt = int(prompt_offsets[row + 1] - prompt_offsets[row])
    start, stop = int(response_offsets[row]), int(response_offsets[row + 1])
    skipped = 1 if prompt == 0 else 0
    into[start + skipped : stop] = prompt_log_probs(output, prompt + skipped)
    return stop - start


def prompt_log_probs(output: RequestOutput, first: int) -> NDArray[np.float64]:
    """The log-probs of a sequence's tokens from the position `first` ≥ 1 on."""
    flat: Any = output.prompt_logprobs
    at = np.asarray(flat.start_indices[first:], dtype=np.int64)
    return np.asarray(flat.logprobs, dtype=np.float64)[at]
