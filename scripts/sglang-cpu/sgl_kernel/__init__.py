"""Stand-in for SGLang's compiled kernels on a CPU without AMX: the only function that is called there."""

from __future__ import annotations

from types import SimpleNamespace

import torch

# With --enable-return-routed-experts, SGLang registers CPU memory with CUDA, even without a GPU.
if not torch.cuda.is_available():
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0)


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: object,
) -> None:
    """Copy each request's new cache places, in order, into its row of the table."""
    place = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[place : place + end - start].to(req_to_token.dtype)
        place += end - start


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return absent
