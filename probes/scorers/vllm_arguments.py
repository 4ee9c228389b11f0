"""Options of the scorers that run in vLLM, and the arguments of the engine that follow from them.

By default prefix caching is off and the mode is eager. No tokenizer is loaded. vLLM materialises [tokens, vocabulary]
for prompt log-probs, so `logits_bytes` bounds the tokens of one engine step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from foreshock_probes.scorers.devices import check_devices, cores_of_ranks
from foreshock_probes.scorers.request import Options, UnsupportedScoreError
from foreshock_probes.scorers.tokens import model_configuration, vocabulary_size

__all__ = ["BYTES_PER_LOGIT", "VllmOptions", "bind_ranks_to_cores", "engine_arguments"]

BYTES_PER_LOGIT = 10  # 2 as computed, 4 as float32, 4 of log-softmax
DEFAULT_LOGITS_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
# vLLM's default for a step is at most this many tokens; a larger bound has no effect.
LARGEST_DEFAULT_STEP = 16_384
SHORTEST_MODEL_LENGTH = 256
# Loaded into every engine, so that one engine serves all of vLLM's scorers; it does nothing for other requests.
FORCED_TOKENS = "foreshock_probes.scorers.forced_tokens:ForcedTokens"
WORKER_EXTENSION = "foreshock_probes.scorers.vllm_worker.WorkerExtension"


class VllmOptions(Options):
    """The engine's settings. `batch_size` rows are submitted together; the engine's scheduler packs them into steps.

    `tensor_parallel_size`: the processes that each layer is divided among, on a GPU or a part of the CPU's cores each.

    `temperature` divides the logits instead of the batch's temperature. The others are vLLM's arguments of the same
    name, `prefix_caching` and `chunked_prefill` without its `enable_`; None: vLLM's default. vLLM does not read its
    prefix cache for prompt log-probs.
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
    gpu_memory_utilization: float = Field(default=0.8, gt=0, le=1)
    batch_size: int = Field(default=128, ge=1)
    temperature: float | None = Field(default=None, gt=0)
    logits_bytes: int | None = Field(default=None, ge=1)


def engine_arguments(weights_folder: Path, options: VllmOptions, longest: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for sequences of at most `longest` tokens; other arguments, other engine.

    Raises UnsupportedScoreError if the model cannot be divided by `tensor_parallel_size`, and TooFewDevicesError.
    """
    _check_tensor_parallel(weights_folder, options.tensor_parallel_size)
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
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.prefix_caching,
        "load_format": "safetensors",
        "generation_config": "vllm",
        "trust_remote_code": False,
        "seed": 0,
        "logits_processors": [FORCED_TOKENS],
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if options.head_dtype:
        arguments["hf_overrides"] = {"head_dtype": options.head_dtype}
    if options.attention_backend:
        arguments["attention_backend"] = options.attention_backend
    if options.chunked_prefill is not None:
        arguments["enable_chunked_prefill"] = options.chunked_prefill
    if options.cascade_attention is not None:
        arguments["disable_cascade_attn"] = not options.cascade_attention
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


def _longest_position(weights_folder: Path) -> int | None:
    value = model_configuration(weights_folder).get("max_position_embeddings")
    return value if isinstance(value, int) else None


def bind_ranks_to_cores(tensor_parallel_size: int) -> None:
    """On a CPU, give each process of a tensor-parallel engine cores of its own, unless the environment does.

    vLLM's default is a NUMA node for each process, which a machine with one node refuses.
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
        # A process may have a copy of a key-value head of its neighbour.
        if name == "num_key_value_heads" and value < size and size % value == 0:
            continue
        raise UnsupportedScoreError(
            f"tensor_parallel_size={size} does not divide the model's {name}={value}; choose a divisor of it"
        )
    check_devices("tensor_parallel_size", size)
