"""The reduction of two tiles of logits on a GPU, as a Triton kernel with one program per row.

Importing this module imports triton. The first loop over the vocabulary computes the likeliest tokens and, by an online
softmax, the normaliser of each tile; the second computes the sums that need both normalisers. Terms are float32, and
sums of a few blocks are added in float64. log Zπ − log Zμ is subtracted in two parts; its remaining error equals
Σπ − Σμ and is corrected in the total variation, the only sum it affects to first order. A χ² above 3e38 is infinite.
"""

# Triton compiles the kernels from their source and allows no annotations but constexpr.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from foreshock_probes.exact_divergence.reduction import SUMS, TileSums

__all__ = ["BLOCK", "TritonReduction", "reduce_rows"]

BLOCK = 1024
_WARPS = 8
# Blocks that are added in float32 per lane before they are summed in float64.
_LANE_BLOCKS = tl.constexpr(8)
_MASKED = tl.constexpr(-1e30)
_POLYNOMIAL = tl.constexpr(0.5)


@triton.jit
def _keep_likeliest(x, columns, largest, values, ids, slots, TOP: tl.constexpr):
    """Observe out of a block `x`, whose maximum is `largest`, what belongs to the TOP likeliest; lower ids go first."""
    inside = slots < TOP
    least = tl.min(tl.where(inside, values, float("inf")), axis=0)
    while largest > least:
        found = tl.min(tl.where(x == largest, columns, 2147483647), axis=0)
        # Among equal values the highest id is replaced.
        rank = tl.where(inside & (values == least), (ids + 1).to(tl.int64) * 65536 + slots, -1)
        leaving = slots == (tl.max(rank, axis=0) % 65536).to(tl.int32)
        values = tl.where(leaving, largest, values)
        ids = tl.where(leaving, found, ids)
        x = tl.where(columns == found, float("-inf"), x)
        largest = tl.max(x, axis=0)
        least = tl.min(tl.where(inside, values, float("inf")), axis=0)
    return values, ids


@triton.jit
def _normaliser(logits, vocabulary, top_values, top_ids, TOP: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit of a row and log Σ e^(logit − largest) in float64; store the likeliest, unordered."""
    slots = tl.arange(0, SLOTS)
    values = tl.full([SLOTS], float("-inf"), tl.float32)
    ids = tl.full([SLOTS], -1, tl.int32)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        of_block = tl.max(x, axis=0)
        larger = tl.maximum(largest, of_block)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        # In float64: if one token has a probability near 1, the logarithm depends on the small remainder of the sum.
        total = total * tl.exp(largest - shift).to(tl.float64) + tl.sum(tl.exp(x - shift).to(tl.float64), axis=0)
        largest = larger
        values, ids = _keep_likeliest(x, columns, of_block, values, ids, slots, TOP)
    tl.store(top_values + slots, values)
    tl.store(top_ids + slots, ids)
    return largest, tl.log(total)


@triton.jit
def _curvature(s):
    """Return s + e^−s − 1 for 0 ≤ s < _POLYNOMIAL, to float32 precision."""
    high = 1.0 / 720.0 - s * (1.0 / 5040.0 - s * (1.0 / 40320.0 - s * (1.0 / 362880.0)))
    return s * s * (0.5 - s * (1.0 / 6.0 - s * (1.0 / 24.0 - s * (1.0 / 120.0 - s * high))))


@triton.jit
def _terms(x, y, largest_target, largest_behaviour, log_target, log_behaviour, difference_high, difference_low):
    """Return the terms of one token for each sum; `compiled_reduction.py` has the same formulas with their reasons."""
    only_behaviour = (x == float("-inf")) & (y > float("-inf"))
    only_target = (y == float("-inf")) & (x > float("-inf"))
    x = tl.where(x == float("-inf"), _MASKED, x)
    y = tl.where(y == float("-inf"), _MASKED, y)
    apart = x - y
    # The rounding error of x − y, which is large if the logits of one source are shifted by a constant.
    moved = apart - x
    lost = (x - (apart - moved)) - (y + moved)
    d = (apart - difference_high) + (lost - difference_low)
    log_pi = (x - largest_target) - log_target
    log_mu = (y - largest_behaviour) - log_behaviour
    below = d < 0.0
    s = tl.abs(d)
    log_larger = tl.where(below, log_mu, log_pi)
    larger = tl.exp(log_larger)
    decay = tl.exp(-s)
    small = s < _POLYNOMIAL
    curve = _curvature(tl.where(small, s, 0.0))
    w = tl.where(small, s - curve, 1.0 - decay)
    away = tl.where(small, curve, s - w)
    toward = tl.where(small, w * s - curve, w - decay * s)
    smaller = larger * decay
    distance = larger * w
    quadratic = distance * w
    # If w is 0, an infinite exponential must not give NaN.
    inflated = tl.where(w > 0.0, tl.exp(log_larger + s) * w * w, 0.0)
    infinite = float("inf")
    kl = tl.where(only_behaviour, infinite, larger * tl.where(below, away, toward))
    reverse_kl = tl.where(only_target, infinite, larger * tl.where(below, toward, away))
    chi2 = tl.where(only_target, infinite, tl.where(below, quadratic, inflated))
    reverse_chi2 = tl.where(only_behaviour, infinite, tl.where(below, inflated, quadratic))
    pi = tl.where(below, smaller, larger)
    mu = tl.where(below, larger, smaller)
    excess = tl.where(below, -distance, distance)
    lean = tl.where(d > 0.0, pi, tl.where(below, -pi, 0.0))
    uncovered = tl.where(only_target, larger, 0.0)
    return kl, reverse_kl, distance, chi2, reverse_chi2, -pi * log_pi, -mu * log_mu, uncovered, excess, lean


@triton.jit
def reduce_rows(
    target, behaviour, stride, vocabulary, sums, normalisers, top_values, top_ids,
    TOP: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce one row of two tiles with row length `stride`; store 8 sums, 2 log-normalisers, 2 × SLOTS likeliest."""
    row = tl.program_id(0).to(tl.int64)
    target += row * stride
    behaviour += row * stride
    tops = row * 2 * SLOTS
    largest_target, log_target = _normaliser(target, vocabulary, top_values + tops, top_ids + tops, TOP, SLOTS, BLOCK)
    largest_behaviour, log_behaviour = _normaliser(
        behaviour, vocabulary, top_values + tops + SLOTS, top_ids + tops + SLOTS, TOP, SLOTS, BLOCK
    )
    difference = (largest_target.to(tl.float64) - largest_behaviour.to(tl.float64)) + (log_target - log_behaviour)
    high = difference.to(tl.float32)
    low = (difference - high.to(tl.float64)).to(tl.float32)
    of_target = log_target.to(tl.float32)
    of_behaviour = log_behaviour.to(tl.float32)
    zero = tl.full([], 0.0, tl.float64)
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    for chunk in range(0, vocabulary, BLOCK * _LANE_BLOCKS):
        lane = tl.zeros([BLOCK], tl.float32)
        a0, a1, a2, a3, a4, a5, a6, a7, a8, a9 = lane, lane, lane, lane, lane, lane, lane, lane, lane, lane
        for start in range(chunk, tl.minimum(chunk + BLOCK * _LANE_BLOCKS, vocabulary), BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < vocabulary
            x = tl.load(target + columns, mask=mask, other=float("-inf")).to(tl.float32)
            y = tl.load(behaviour + columns, mask=mask, other=float("-inf")).to(tl.float32)
            t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 = _terms(
                x, y, largest_target, largest_behaviour, of_target, of_behaviour, high, low
            )
            a0, a1, a2, a3, a4 = a0 + t0, a1 + t1, a2 + t2, a3 + t3, a4 + t4
            a5, a6, a7, a8, a9 = a5 + t5, a6 + t6, a7 + t7, a8 + t8, a9 + t9
        s0 += tl.sum(a0, axis=0).to(tl.float64)
        s1 += tl.sum(a1, axis=0).to(tl.float64)
        s2 += tl.sum(a2, axis=0).to(tl.float64)
        s3 += tl.sum(a3, axis=0).to(tl.float64)
        s4 += tl.sum(a4, axis=0).to(tl.float64)
        s5 += tl.sum(a5, axis=0).to(tl.float64)
        s6 += tl.sum(a6, axis=0).to(tl.float64)
        s7 += tl.sum(a7, axis=0).to(tl.float64)
        s8 += tl.sum(a8, axis=0).to(tl.float64)
        s9 += tl.sum(a9, axis=0).to(tl.float64)
    sums += row * 8
    tl.store(sums + 0, s0)
    tl.store(sums + 1, s1)
    tl.store(sums + 2, 0.5 * (s2 - s8 * s9))
    tl.store(sums + 3, s3)
    tl.store(sums + 4, s4)
    tl.store(sums + 5, s5)
    tl.store(sums + 6, s6)
    tl.store(sums + 7, s7)
    tl.store(normalisers + row * 2, largest_target.to(tl.float64) + log_target)
    tl.store(normalisers + row * 2 + 1, largest_behaviour.to(tl.float64) + log_behaviour)


class TritonReduction:
    """Reduction of `target` and `behaviour`, tiles [rows, V] of one dtype (bfloat16, float16 or float32) on one GPU."""

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
        # Triton launches on the current device, not on that of its arguments.
        device = torch.cuda.device(target.device) if target.device.type == "cuda" else contextlib.nullcontext()
        if rows:
            with device:
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
        """Do nothing; the tensors are freed with the object."""

    def _ordered(self, rows: int) -> torch.Tensor:
        """Return the likeliest ids in descending order, ties by lower id, shape [2, rows, top_k]."""
        ids, by_id = self._ids[:rows].sort(dim=-1)
        values = self._values[:rows].gather(-1, by_id)
        by_value = values.sort(dim=-1, descending=True, stable=True).indices
        return ids.gather(-1, by_value)[..., : self._top_k].transpose(0, 1).long()
