"""The fingerprints of engine and trainer: everything on this machine that can change the last bits of μ and π."""

from __future__ import annotations

from importlib.metadata import version

import torch

from examples.tiny_rl.sampler import logprobs_mode
from examples.tiny_rl.task import MAX_RESPONSE_TOKENS
from foreshock.fingerprint import Fingerprint
from foreshock.process_fingerprint import cpu_name, kernel_flags

ENGINE_FLAGS = {
    "vllm": {"enforce_eager": "true", "prefix_caching": "false"},
    "sglang": {"attention_backend": "torch_native", "radix_cache": "false"},
}


def engine_fingerprint(
    engine_version: str,
    weights_version: int | None,
    weights_digest: str | None,
    engine: str = "vllm",
    temperature: float = 1.0,
) -> Fingerprint:
    """Return the fingerprint of `engine` with the weights of one step; None leaves the weights open."""
    return Fingerprint(
        engine=engine,
        engine_version=engine_version,
        dtype="bfloat16",
        logprobs_mode=logprobs_mode(temperature),
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        flags={**ENGINE_FLAGS[engine], "max_tokens": str(MAX_RESPONSE_TOKENS), **kernel_flags()},
        weights_version=weights_version,
        weights_digest=weights_digest,
        batch_composition="continuous batching of 128 sequences",
        device_name=cpu_name(),
        cpu_isa=torch.backends.cpu.get_cpu_capability(),
        library_versions={name: version(name) for name in ("torch", "transformers")},
    )


def trainer_fingerprint(weights_version: int | None, weights_digest: str | None) -> Fingerprint:
    """Return the fingerprint of `Trainer` with the weights of one step; None leaves the weights open."""
    return Fingerprint(
        engine="torch",
        engine_version=version("torch"),
        dtype="bfloat16",
        master_dtype="float32",
        autocast="bfloat16",
        flags=kernel_flags(),
        weights_version=weights_version,
        weights_digest=weights_digest,
        device_name=cpu_name(),
        cpu_isa=torch.backends.cpu.get_cpu_capability(),
        library_versions={name: version(name) for name in ("torch", "transformers")},
    )
