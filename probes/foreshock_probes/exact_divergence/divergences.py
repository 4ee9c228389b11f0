"""Compute divergences over the whole vocabulary of two distributions given by hidden states and heads.

Tokens are processed in tiles: both products of a tile are written to memory, then each row of both is reduced while it
is in cache. Each product is computed once, and the memory is two tiles [tile_tokens, V] for any number of tokens. Total
variation needs both normalisers, so a method that keeps only vocabulary blocks would compute both products twice.

A product that can be written to its tile directly is one call for the whole vocabulary: with AMX, calls for blocks of
8192 tokens took 1.4 to 1.8 times the processor time of one call. Other products need copies (of the head in float32,
or of logits before a soft cap) and are computed one block at a time.

Terms and sums are float64. `reduce_in_torch` reduces tiles on a GPU, `compiled_reduction` on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from foreshock_probes.exact_divergence.logit_sources import Source, SourceError

# The sums over the vocabulary. The terms of KL(μ‖π) are π − μ + μ log(μ/π). Their sum is the same; no term is negative,
# so nothing cancels if the distributions are nearly equal.
SUMS = ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2", "target_entropy", "behaviour_entropy", "uncovered")

# Logits of a part of a tile; each of about twenty temporary arrays then takes 32 MiB.
_PART = 1 << 22
# Log-prob of masked tokens. e^x of it is 0; it is finite, so that the difference of two of them is 0, not NaN.
MASKED = -1e300
# |log π − log μ| below which e^x − 1 − x is computed by a polynomial, and its coefficients, from x² on.
POLYNOMIAL = 0.3
COEFFICIENTS = tuple(1.0 / math.factorial(power) for power in range(2, 14))


@dataclass(frozen=True, slots=True, eq=False)
class TileSums:
    """The result of a reduction; the target comes first.

    `sums` [rows, len(SUMS)] and `log_normalisers` [2, rows] are float64; `likeliest` [2, rows] int64 are the likeliest
    tokens, the lowest id of equal ones. The sum `uncovered` is the probability under π of tokens with μ = 0.
    """

    sums: torch.Tensor
    log_normalisers: torch.Tensor
    likeliest: torch.Tensor


def reduce_in_torch(target: torch.Tensor, behaviour: torch.Tensor) -> TileSums:
    """Return the sums of two tiles [rows, V] of one dtype."""
    size = max(_PART // target.shape[1], 1)
    parts = [
        _reduce(target[start : start + size].double(), behaviour[start : start + size].double())
        for start in range(0, max(target.shape[0], 1), size)
    ]
    sums, normalisers, ids = zip(*parts, strict=True)
    return TileSums(torch.cat(sums), torch.cat(normalisers, 1), torch.cat(ids, 1))


def _reduce(target: torch.Tensor, behaviour: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return `sums`, `log_normalisers` and `likeliest` of TileSums."""
    ids = torch.stack([_likeliest(logits) for logits in (target, behaviour)])
    (log_pi, of_target, log_target), (log_mu, of_behaviour, log_behaviour) = (
        _log_probs(logits) for logits in (target, behaviour)
    )
    # The parts of the normalisers are subtracted one after the other: logits of 1e4 would otherwise lose digits.
    d = (of_target - of_behaviour) - (log_target[1] - log_behaviour[1])
    only_target = (behaviour == -math.inf) & (target > -math.inf)
    only_behaviour = (target == -math.inf) & (behaviour > -math.inf)
    sums = torch.stack(_sums(d, log_pi, log_mu, only_target, only_behaviour), 1)
    normalisers = torch.stack([log_target.sum(0)[:, 0], log_behaviour.sum(0)[:, 0]])
    sums[~torch.isfinite(normalisers).all(0)] = math.nan
    return sums, normalisers, ids


def _log_probs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probs, the logits less the largest, and the two parts [2, rows, 1] of the log-normaliser."""
    largest = logits.amax(1, keepdim=True)
    shifted = logits - largest.clamp_min(torch.finfo(torch.float64).min)
    log_total = shifted.exp().sum(1, keepdim=True).log()
    shifted = torch.where(logits == -math.inf, MASKED, shifted)
    return shifted - log_total, shifted, torch.stack([largest, log_total])


def _sums(
    d: torch.Tensor, log_pi: torch.Tensor, log_mu: torch.Tensor, only_target: torch.Tensor, only_behaviour: torch.Tensor
) -> list[torch.Tensor]:
    """Return the sums of SUMS.

    With s = |d|, `likelier` the larger of π and μ, and w = 1 − e^−s: |π − μ| = likelier·w.
    """
    below, s = d < 0.0, d.abs()
    log_likelier = torch.where(below, log_mu, log_pi)
    likelier, decay, w = log_likelier.exp(), (-s).exp(), -torch.expm1(-s)
    small = s < POLYNOMIAL
    curve = _curve(-s.clamp_max(POLYNOMIAL))
    away = torch.where(small, curve, s - w)  # s − w
    toward = torch.where(small, w * s - curve, w - decay * s)  # e^−s·(e^s − 1 − s)
    quadratic = likelier * w * w
    inflated = (log_likelier + s).exp() * w * w  # (π − μ)² over the smaller
    smaller = likelier * decay
    terms = {
        "kl": torch.where(only_behaviour, math.inf, likelier * torch.where(below, away, toward)),
        "reverse_kl": torch.where(only_target, math.inf, likelier * torch.where(below, toward, away)),
        "tv": 0.5 * likelier * w,
        "chi2": torch.where(only_target, math.inf, torch.where(below, quadratic, inflated)),
        "reverse_chi2": torch.where(only_behaviour, math.inf, torch.where(below, inflated, quadratic)),
        "target_entropy": -torch.where(below, smaller, likelier) * log_pi,
        "behaviour_entropy": -torch.where(below, likelier, smaller) * log_mu,
        "uncovered": torch.where(only_target, likelier, 0.0),
    }
    sums = {name: values.sum(1) for name, values in terms.items()}
    sums["tv"] = sums["tv"].clamp_max(1.0)
    return [sums[name] for name in SUMS]


def _curve(x: torch.Tensor) -> torch.Tensor:
    """Return e^x − 1 − x for small |x|."""
    total = torch.full_like(x, COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        total = total * x + coefficient
    return x * x * total


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of each row's largest logit, [rows]: of equal ones the lowest, −1 if all are −∞ or one is NaN."""
    largest = logits.amax(1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    first = ids.masked_fill(logits != largest, logits.shape[1]).amin(1)
    return first.masked_fill(~(largest[:, 0] > -math.inf), -1)


Float64 = NDArray[np.float64]
Pair = tuple[torch.Tensor, torch.Tensor]

TILE_TOKENS = 128
VOCABULARY_BLOCK = 8192
_TILE_TOKENS_CUDA = 512  # with fewer tokens, reading the head's weights is slower than the tensor cores


@dataclass(frozen=True, slots=True, eq=False)
class ExactDivergences:
    """Divergences between the sampling distribution μ and the trained distribution π at T states; all arrays [T].

    | field | unit | estimated from tokens drawn from μ by |
    | --- | --- | --- |
    | `kl` KL(μ‖π) | nats | `kl`, `k3_kl` |
    | `reverse_kl` KL(π‖μ) | nats | |
    | `tv` ½ Σ|π − μ| | 0 … 1 | `tv_token` |
    | `chi2` χ²(π‖μ) = Σ (π − μ)²/μ | | `chi2_token` |
    | `reverse_chi2` χ²(μ‖π) = Σ (π − μ)²/π | | `reverse_chi2_token` |
    | `mean_ratio` E_μ ρ: π's probability where μ > 0 | 0 … 1 | `mean_ratio` |
    | `behaviour_entropy`, `target_entropy` H(μ), H(π) | nats | |

    A divergence is infinite if its support is not covered. If a logit of a state is NaN or +inf, or all are −inf, all
    of its values are NaN and `top1_flip` is False.

    `top1_flip` is True if the likeliest tokens differ; among equally likely tokens the lower id comes first. The
    log-probs are those of the `token_ids` of `exact_divergences`.
    """

    kl: Float64
    reverse_kl: Float64
    tv: Float64
    chi2: Float64
    reverse_chi2: Float64
    mean_ratio: Float64
    behaviour_entropy: Float64
    target_entropy: Float64
    top1_flip: NDArray[np.bool_]
    behaviour_log_probs: Float64 | None = None
    target_log_probs: Float64 | None = None

    @property
    def tokens(self) -> int:
        return self.kl.size

    @property
    def delta_max(self) -> float:
        """Δmax, the largest total variation at the visited states, 0 … 1; NaN if there is none.

        It is a lower bound of the supremum over all states. Sampled |1 − ρ| does not give such a bound.
        """
        known = self.tv[~np.isnan(self.tv)]
        return float(known.max()) if known.size else math.nan

    @classmethod
    def concatenate(cls, parts: Sequence[ExactDivergences]) -> ExactDivergences:
        """Return the states of all `parts` in order. There must be at least one part, all with the same fields."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            found = [getattr(part, field.name) for part in parts]
            values[field.name] = None if found[0] is None else np.concatenate(found)
        return cls(**values)


def exact_divergences(
    target: Source,
    behaviour: Source,
    *,
    token_ids: ArrayLike | None = None,
    tile_tokens: int | None = None,
    vocabulary_block: int = VOCABULARY_BLOCK,
) -> ExactDivergences:
    """Return the divergences of π (`target`) and μ (`behaviour`) at T states, exact for the sources' logits.

    With `token_ids` [T] the result has both log-probs of these tokens. If a head is on a GPU and neither source is
    float64, the reduction runs there, else on the CPU, both in float64. The memory beyond the
    inputs is two tiles of `tile_tokens` × V logits (bfloat16 if both sources are) and, on a CPU without bfloat16
    products, a block of the head of `vocabulary_block` tokens in float32. Raises SourceError if T or V differ, an id is
    not in the vocabulary, or a size is below 1.
    """
    ids = _checked(target, behaviour, token_ids, tile_tokens, vocabulary_block)
    device = _device_of(target, behaviour)
    rows = min(tile_tokens or (_TILE_TOKENS_CUDA if device.type == "cuda" else TILE_TOKENS), max(target.tokens, 1))
    held_in = torch.promote_types(target.held_in, behaviour.held_in)
    shape = (rows, target.vocabulary)
    whole = (torch.empty(shape, dtype=held_in, device=device), torch.empty(shape, dtype=held_in, device=device))
    reduce = _reduction_on(device)
    parts = []
    with torch.no_grad():
        for start in range(0, max(target.tokens, 1), rows):
            stop = min(start + rows, target.tokens)
            tiles = (whole[0][: stop - start], whole[1][: stop - start])
            for source, tile in zip((target, behaviour), tiles, strict=True):
                _fill(tile, source, start, stop, vocabulary_block)
            sums = reduce(*tiles)
            chosen = None if ids is None else _log_probs_divergences(tiles, sums, ids[start:stop])
            parts.append(_as_divergences(sums, chosen))
    return ExactDivergences.concatenate(parts)


def _fill(tile: torch.Tensor, source: Source, start: int, stop: int, vocabulary_block: int) -> None:
    """Write the logits of the tokens `start` … `stop` to a tile [stop − start, V]."""
    is_whole = tile.device.type == "cuda" or source.writes_directly(tile.dtype)
    block = source.vocabulary if is_whole else min(vocabulary_block, source.vocabulary)
    states = source.rows(start, stop)
    for first in range(0, source.vocabulary, block):
        last = min(first + block, source.vocabulary)
        source.write_logits(states, first, last, tile[:, first:last])


def _device_of(target: Source, behaviour: Source) -> torch.device:
    """Return the device of the reduction; float64 logits cannot be reduced on a GPU."""
    on_gpu = [source.device for source in (behaviour, target) if source.device.type == "cuda"]
    in_float64 = torch.float64 in (target.held_in, behaviour.held_in)
    return on_gpu[0] if on_gpu and not in_float64 else torch.device("cpu")


def _reduction_on(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], TileSums]:
    if device.type == "cuda":
        return reduce_in_torch
    from foreshock_probes.exact_divergence.compiled_reduction import reduce_compiled

    return reduce_compiled


def _log_probs_divergences(tiles: Pair, sums: TileSums, ids: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """Return log π and log μ of one token per row, each [rows]."""
    at = torch.from_numpy(ids).to(tiles[0].device)[:, None]
    logits = (tile.gather(1, at)[:, 0].double() for tile in tiles)
    return [(logit - normaliser).cpu().numpy() for logit, normaliser in zip(logits, sums.log_normalisers, strict=True)]


def _as_divergences(sums: TileSums, log_probs: list[NDArray[np.float64]] | None) -> ExactDivergences:
    known = torch.isfinite(sums.log_normalisers).all(0)
    flips = (sums.likeliest[0] != sums.likeliest[1]) & known
    values = {name: sums.sums[:, column].cpu().numpy().copy() for column, name in enumerate(SUMS)}
    return ExactDivergences(
        mean_ratio=np.maximum(1.0 - values.pop("uncovered"), 0.0),
        top1_flip=flips.cpu().numpy(),
        target_log_probs=log_probs[0] if log_probs else None,
        behaviour_log_probs=log_probs[1] if log_probs else None,
        **values,
    )


def _checked(
    target: Source,
    behaviour: Source,
    token_ids: ArrayLike | None,
    tile_tokens: int | None,
    vocabulary_block: int,
) -> NDArray[np.int64] | None:
    """Check the arguments and return the token ids as an array; raise SourceError if one is invalid."""
    if target.tokens != behaviour.tokens or target.vocabulary != behaviour.vocabulary:
        raise SourceError(
            f"both sources need the same tokens and vocabulary, got [{target.tokens}, {target.vocabulary}] and "
            f"[{behaviour.tokens}, {behaviour.vocabulary}]"
        )
    if min(vocabulary_block, 1 if tile_tokens is None else tile_tokens) < 1:
        raise SourceError(
            f"tile_tokens and vocabulary_block must be at least 1, got {tile_tokens} and {vocabulary_block}"
        )
    if token_ids is None:
        return None
    ids = np.asarray(token_ids)
    if ids.shape != (target.tokens,) or (ids.size and ids.dtype.kind not in "iu"):
        raise SourceError(f"token_ids must be {target.tokens} whole numbers, got {list(ids.shape)} of {ids.dtype}")
    outside = np.flatnonzero((ids < 0) | (ids >= target.vocabulary))
    if outside.size:
        at = int(outside[0])
        raise SourceError(f"token_ids[{at}] must satisfy 0 <= id < {target.vocabulary}, got {ids[at]}")
    return ids.astype(np.int64)
