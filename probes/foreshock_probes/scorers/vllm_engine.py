"""A vLLM engine in this process: set its options, start it, run prompts.

By default prefix caching is off and the mode is eager. No tokenizer is loaded. vLLM materialises [tokens, vocabulary]
for prompt log-probs, so `logits_bytes` bounds the tokens of one engine step.
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
from foreshock_probes.adapters import modules_of, rank_of
from foreshock_probes.scorers.devices import check_devices, cores_of_ranks
from foreshock_probes.scorers.request import (
    Options,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    score_fingerprint,
)
from foreshock_probes.scorers.sampling import divisors, sampled_temperature
from foreshock_probes.scorers.tokens import check_tokens, model_configuration, sequence_lengths, vocabulary_size

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

BYTES_PER_LOGIT = 10  # 2 as computed, 4 as float32, 4 for log-softmax
DEFAULT_LOGITS_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
# vLLM's default for a step is at most this many tokens; a larger bound has no effect.
LARGEST_DEFAULT_STEP = 16_384
SHORTEST_MODEL_LENGTH = 256
# The ranks of adapters for which vLLM's buffers can be made.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Loaded into every engine, so that one engine serves all of vLLM's scorers; it does not affect other requests.
FORCED_TOKENS = "foreshock_probes.scorers.vllm_plugins:ForcedTokens"
WORKER_EXTENSION = "foreshock_probes.scorers.vllm_plugins.WorkerExtension"


class VllmOptions(Options):
    """The engine's settings. `batch_size` rows are submitted together; the engine's scheduler packs them into steps.

    `tensor_parallel_size`: the processes that each layer is divided among, on a GPU or a part of the CPU's cores each.

    `temperature` divides the logits instead of the batch's temperature. The others are vLLM's arguments of the same
    name, `prefix_caching` and `chunked_prefill` without its `enable_`; None: vLLM's default. `max_model_len` is the
    least one, for requests that are to share an engine. vLLM does not read its prefix cache for prompt log-probs.
    """

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    head_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None
    tensor_parallel_size: int = Field(default=1, ge=1)
    enforce_eager: bool = True
    prefix_caching: bool = False
    chunked_prefill: bool | None = None
    cascade_attention: bool | None = None
    max_num_batched_tokens: int | None = Field(default=None, ge=16)
    max_model_len: int = Field(default=SHORTEST_MODEL_LENGTH, ge=1)
    gpu_memory_utilization: float = Field(default=0.8, gt=0, le=1)
    batch_size: int = Field(default=128, ge=1)
    temperature: float | None = Field(default=None, gt=0)
    logits_bytes: int | None = Field(default=None, ge=1)


def engine_arguments(
    weights_folder: Path, options: VllmOptions, longest: int, adapter: Path | None = None
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for sequences of at most `longest` tokens; other arguments need a new engine.

    `adapter`: the folder of a LoRA adapter that the engine is to load over the weights.
    Raises UnsupportedScoreError if the model cannot be divided by `tensor_parallel_size`, and TooFewDevicesError.
    """
    _check_tensor_parallel(weights_folder, options.tensor_parallel_size)
    # Room for the one generated token, rounded up so that the rollouts of other tasks fit the same engine.
    length = max(options.max_model_len, 1 << longest.bit_length())
    longest_allowed = model_configuration(weights_folder).get("max_position_embeddings")
    if isinstance(longest_allowed, int):
        length = max(min(length, longest_allowed), longest + 1)
    arguments: dict[str, Any] = {
        "model": str(weights_folder),
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": length,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "skip_tokenizer_init": True,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.prefix_caching,
        "load_format": "safetensors",
        "generation_config": "vllm",
        "trust_remote_code": False,
        "seed": 0,
        "logits_processors": [FORCED_TOKENS],
        "worker_extension_cls": WORKER_EXTENSION,
    }
    chosen = {
        "hf_overrides": {"head_dtype": options.head_dtype} if options.head_dtype else None,
        "attention_backend": options.attention_backend or None,
        "enable_chunked_prefill": options.chunked_prefill,
        "disable_cascade_attn": None if options.cascade_attention is None else not options.cascade_attention,
    }
    arguments |= {name: value for name, value in chosen.items() if value is not None}
    if adapter is not None:
        rank = rank_of(adapter)
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next((each for each in _LORA_RANKS if each >= rank), rank),
            # With LoRA layers around the head, vLLM 0.32 computes prompt log-probs by the sampled rows' adapters.
            "lora_target_modules": modules_of(adapter),
        }
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    bound = (options.logits_bytes or DEFAULT_LOGITS_BYTES[kind]) // (
        BYTES_PER_LOGIT * (vocabulary_size(weights_folder) or 1)
    )
    asked = options.max_num_batched_tokens
    if asked is not None or bound < LARGEST_DEFAULT_STEP:
        tokens = max(min(int(bound), asked or LARGEST_DEFAULT_STEP), 16)
        arguments |= {"max_num_batched_tokens": tokens, "max_num_seqs": min(tokens, 128)}
        arguments.setdefault("enable_chunked_prefill", True)
    return arguments


def bind_ranks_to_cores(tensor_parallel_size: int) -> None:
    """On a CPU, give each process of a tensor-parallel engine its own cores, unless the environment already does.

    vLLM's default is one NUMA node per process, which fails on a machine with one node.
    """
    if tensor_parallel_size > 1 and not torch.cuda.is_available():
        lists = [",".join(map(str, cores)) for cores in cores_of_ranks(tensor_parallel_size)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(lists))


def _check_tensor_parallel(weights_folder: Path, size: int) -> None:
    """Raise if attention or feed-forward layers cannot be divided among `size` processes, or devices are too few."""
    if size == 1:
        return
    configuration = model_configuration(weights_folder)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = configuration.get(name)
        if not isinstance(value, int) or value % size == 0:
            continue
        # Several processes may hold a copy of the same key-value head.
        if name == "num_key_value_heads" and value < size and size % value == 0:
            continue
        raise UnsupportedScoreError(
            f"tensor_parallel_size={size} does not divide the model's {name}={value}; choose a divisor of it"
        )
    check_devices("tensor_parallel_size", size)


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


def prepare_engine(request: ScoreRequest, options: VllmOptions, warm: WarmModel, in_process: str = "") -> Prepared:
    """Start an engine with the request's weights, unless the process has it. Raises UnsupportedScoreError.

    `in_process`: what needs its model in this process, for the error if the options divide it.
    """
    if in_process and options.tensor_parallel_size != 1:
        raise UnsupportedScoreError(f"{in_process} need tensor_parallel_size=1, got {options.tensor_parallel_size}")
    rollouts = request.rollouts
    check_tokens(rollouts, request.weights_folder)
    divisor = divisors(rollouts, options.temperature)
    longest = int(sequence_lengths(rollouts).max(initial=1))
    arguments = engine_arguments(request.weights_folder, options, longest, request.adapter)
    key = (repr(sorted(arguments.items())), request.weights_digest)
    engine = warm.get(key, lambda: VllmEngine(arguments, request.adapter))
    return Prepared(engine, divisor)


class VllmEngine:
    """A vLLM engine in this process, started with the weights in the folder `model` of its arguments.

    All of its prompts use the LoRA adapter in the folder `adapter`, if there is one.
    """

    def __init__(self, arguments: dict[str, Any], adapter: Path | None = None) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        bind_ranks_to_cores(arguments["tensor_parallel_size"])
        self._adapter = None if adapter is None else LoRARequest("adapter", 1, str(adapter))
        try:
            self._llm: LLM = LLM(**arguments)
            if self._adapter is not None:
                self._llm.llm_engine.add_lora(self._adapter)
        except (ValueError, NotImplementedError, ImportError) as error:
            raise UnsupportedScoreError(f"vLLM cannot load the checkpoint: {error}") from error
        self._divisor = 1.0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        names = {name for names in self._llm.collective_rpc("foreshock_attention_backends") for name in names}
        self.attention_backend = "+".join(sorted(names)) or None

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
        outputs: list[RequestOutput] = self._llm.generate(made, parameters, use_tqdm=False, lora_request=self._adapter)
        return outputs

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
        """Return the fingerprint's flags that are needed to set up the same engine."""
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


def bfloat16_conversion() -> str | None:
    """Return how vLLM's CPU kernels convert float32 to bfloat16 here: "nearest" or "truncated"; None if unknown.

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
