"""Columns of response tokens that Megatron's context parallelism split over ranks, put together again.

A sequence of t tokens is cut into 2·size chunks of ceil(t / (2·size)) positions; rank r holds the chunks r and
2·size − 1 − r, so that causal attention costs every rank the same. The log-prob of a token stands at the position
before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["gather_slices", "response_ranges"]


def response_ranges(total: int, response: int, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two ranges [begin, end) of response tokens that a rank holds, counted from the first of them."""
    chunk = -(-total // (2 * size))
    prompt = total - response
    found = []
    for number in (rank, 2 * size - 1 - rank):
        begin = max(number * chunk, prompt - 1)
        end = min((number + 1) * chunk, total - 1)
        found.append((begin - prompt + 1, end - prompt + 1) if begin < end else (0, 0))
    return found[0], found[1]


def gather_slices(
    slices: Mapping[str, Sequence[Any] | None],
    totals: Sequence[int],
    responses: Sequence[int],
    *,
    rank: int,
    size: int,
    group: Any,
    device: Any,
) -> dict[str, NDArray[np.float32]]:
    """Return each column flat over all response tokens [T]; every rank of `group` must call this with the same names.

    `slices` has one tensor per sample, the two ranges of this rank joined. A column that is None here, or a slice of
    another length, becomes NaN in this rank's ranges: a rank that stopped instead would leave the others waiting.
    """
    import torch

    names = list(slices)
    ends = np.cumsum(np.asarray(responses, np.int64))
    joined = torch.zeros((len(names), int(ends[-1]) if ends.size else 0), dtype=torch.float32, device=device)
    for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
        offset = int(ends[sample]) - int(response)
        (first, split), (second, last) = response_ranges(int(total), int(response), rank, size)
        width = split - first
        for row, name in enumerate(names):
            column = slices[name]
            values = None if column is None else column[sample]
            if values is None or values.shape != (width + last - second,):
                values = torch.full((width + last - second,), math.nan)
            joined[row, offset + first : offset + split] = values[:width].detach()
            joined[row, offset + second : offset + last] = values[width:].detach()
    torch.distributed.all_reduce(joined, group=group)
    gathered: NDArray[np.float32] = joined.cpu().numpy()
    return {name: gathered[row] for row, name in enumerate(names)}
