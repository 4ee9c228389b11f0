"""Compute divergences over the whole vocabulary of two distributions given by their logits.

States are processed in chunks: both logits of a chunk are in memory at a time, and each row of both is reduced in
float64 by one compiled loop (`reduction`) on the CPU; logits of a GPU are copied there. In torch the same terms need
some thirty temporary arrays: at V = 151,936 on two cores of a busy machine 2.1 s of processor time for 32 states, and
0.12 s in the loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from foreshock_probes.exact_divergence.logit_sources import Source, SourceError

# The sums over the vocabulary. The terms of KL(μ‖π) are π − μ + μ log(μ/π). Their sum is the same; no term is negative,
# so nothing cancels if the distributions are nearly equal. `uncovered` is π's probability of tokens with μ = 0.
SUMS = ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2", "target_entropy", "behaviour_entropy", "uncovered")

_ROWS = 4  # rows per task of a thread
CHUNK = 128

Array = NDArray[Any]
Float64 = NDArray[np.float64]


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
    target: Source, behaviour: Source, *, token_ids: ArrayLike | None = None, chunk: int = CHUNK
) -> ExactDivergences:
    """Return the divergences of π (`target`) and μ (`behaviour`) at T states, exact for the sources' logits.

    With `token_ids` [T] the result has both log-probs of these tokens. The memory beyond the inputs is that of the
    logits of `chunk` states. Raises SourceError if T or V differ, an id is not in the vocabulary, or `chunk` is
    below 1.
    """
    ids = _checked(target, behaviour, token_ids, chunk)
    with torch.no_grad(), ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="exact-divergence") as threads:
        parts = []
        for start in range(0, max(target.tokens, 1), chunk):
            stop = min(start + chunk, target.tokens)
            of_target, of_behaviour = (_as_array(source.logits(start, stop)) for source in (target, behaviour))
            parts.append(_reduced(of_target, of_behaviour, None if ids is None else ids[start:stop], threads))
    return ExactDivergences.concatenate(parts)


def _reduced(
    target: Array, behaviour: Array, ids: NDArray[np.int64] | None, threads: ThreadPoolExecutor
) -> ExactDivergences:
    """Return the divergences of two logits [rows, V]; the result does not depend on the number of threads."""
    from foreshock_probes.exact_divergence.reduction import reduce_rows

    rows = target.shape[0]
    log_normalisers, sums = np.empty((2, rows)), np.empty((rows, len(SUMS)))
    likeliest = np.empty((2, rows), dtype=np.int64)

    def reduce_part(first: int) -> None:
        part = slice(first, first + _ROWS)
        reduce_rows(target[part], behaviour[part], log_normalisers[:, part], sums[part], likeliest[:, part])

    list(threads.map(reduce_part, range(0, rows, _ROWS)))
    values: dict[str, Any] = {name: sums[:, column].copy() for column, name in enumerate(SUMS)}
    if ids is not None:
        at = np.arange(rows), ids
        values["target_log_probs"] = target[at].astype(np.float64) - log_normalisers[0]
        values["behaviour_log_probs"] = behaviour[at].astype(np.float64) - log_normalisers[1]
    return ExactDivergences(
        mean_ratio=np.maximum(1.0 - values.pop("uncovered"), 0.0),
        top1_flip=(likeliest[0] != likeliest[1]) & np.isfinite(log_normalisers).all(axis=0),
        **values,
    )


def _as_array(logits: torch.Tensor) -> Array:
    """Return logits as a float32 or float64 array."""
    on_cpu = logits.cpu()
    found: Array = (on_cpu if on_cpu.dtype == torch.float64 else on_cpu.float()).numpy()
    return found


def _checked(
    target: Source,
    behaviour: Source,
    token_ids: ArrayLike | None,
    chunk: int,
) -> NDArray[np.int64] | None:
    """Check the arguments and return the token ids as an array; raise SourceError if one is invalid."""
    if target.tokens != behaviour.tokens or target.vocabulary != behaviour.vocabulary:
        raise SourceError(
            f"both sources need the same tokens and vocabulary, got [{target.tokens}, {target.vocabulary}] and "
            f"[{behaviour.tokens}, {behaviour.vocabulary}]"
        )
    if chunk < 1:
        raise SourceError(f"chunk must be at least 1, got {chunk}")
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
