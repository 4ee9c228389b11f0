"""Reduces two tiles of logits with the Triton kernel: what `compiled.CompiledReduction` is on a CPU."""

from __future__ import annotations

import contextlib

import torch

from probes.exact_divergence.reduction import SUMS, TileSums
from probes.exact_divergence.triton_kernels import BLOCK, reduce_rows

__all__ = ["TritonReduction"]

_WARPS = 8


class TritonReduction:
    """Reduces `target` and `behaviour`, tiles [rows, V] of one dtype (bfloat16, float16 or float32) on one GPU."""

    def __init__(self, target: torch.Tensor, behaviour: torch.Tensor, top_k: int) -> None:
        self._tiles = (target, behaviour)
        self._top_k = top_k
        rows, device = target.shape[0], target.device
        slots = 1 << (top_k - 1).bit_length()
        self._sums = torch.empty((rows, len(SUMS)), dtype=torch.float64, device=device)
        self._normalisers = torch.empty((rows, 2), dtype=torch.float64, device=device)
        self._values = torch.empty((rows, 2, slots), dtype=torch.float32, device=device)
        self._ids = torch.empty((rows, 2, slots), dtype=torch.int32, device=device)

    def reduce(self, rows: int) -> TileSums:
        target, behaviour = self._tiles
        # Triton launches on the current device, wherever its arguments are.
        there = torch.cuda.device(target.device) if target.device.type == "cuda" else contextlib.nullcontext()
        if rows:
            with there:
                reduce_rows[(rows,)](
                    target,
                    behaviour,
                    target.stride(0),
                    target.shape[1],
                    self._sums,
                    self._normalisers,
                    self._values,
                    self._ids,
                    TOP=self._top_k,
                    SLOTS=self._ids.shape[-1],
                    BLOCK=BLOCK,
                    num_warps=_WARPS,
                    enable_fp_fusion=True,
                )
        log_normalisers = self._normalisers[:rows].T.clone()
        sums = self._sums[:rows].clone()
        sums[~torch.isfinite(log_normalisers).all(0)] = torch.nan
        sums[:, SUMS.index("tv")].clamp_(0.0, 1.0)
        return TileSums(sums, log_normalisers, self._ordered(rows))

    def close(self) -> None:
        """Its memory goes with it."""

    def _ordered(self, rows: int) -> torch.Tensor:
        """[2, rows, top_k] the likeliest first, among equals the lower id."""
        ids, by_id = self._ids[:rows].sort(dim=-1)
        values = self._values[:rows].gather(-1, by_id)
        by_value = values.sort(dim=-1, descending=True, stable=True).indices
        return ids.gather(-1, by_value)[..., : self._top_k].transpose(0, 1).long()
