"""The compiled functions, created once per process: from numba's cache on disk if possible, otherwise compiled."""

from __future__ import annotations

import functools
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.input_columns import batch_columns
from foreshock.measures.passes.compiled.lane import LaneFunction, VerlLaneFunction, lane_function, verl_lane_function
from foreshock.measures.passes.compiled.lane_state import lookups, new_state
from foreshock.measures.passes.compiled.merge_lanes import MergeFunction, merge_function
from foreshock.measures.statistics.rollout_sums import RolloutSums

__all__ = ["CompiledFunctions", "compiled_functions"]

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class CompiledFunctions:
    """The entry functions as machine code; one serves all input types."""

    sum_lane: LaneFunction
    sum_verl_lane: VerlLaneFunction
    merge_tables: MergeFunction


def compiled_functions() -> CompiledFunctions:
    """Return the functions. The first call compiles (seconds) or loads numba's cache (a fraction of a second)."""
    with _lock:
        return _functions()


@functools.cache
def _functions() -> CompiledFunctions:
    try:
        return _compile(cached=True)
    except Exception:
        # numba has no writable folder, the disk is full, or a cached file is truncated, for which its reader raises
        # exceptions of any type. Compile for this process only; an error in the functions themselves is raised again.
        return _compile(cached=False)


def _compile(*, cached: bool) -> CompiledFunctions:
    sources = digest_of_sources()
    functions = CompiledFunctions(
        lane_function(sources, cached=cached),
        verl_lane_function(sources, cached=cached),
        merge_function(sources, cached=cached),
    )
    _call_once(functions, sources)
    return functions


def digest_of_sources() -> int:
    """Return a number that changes with anything built into the machine code: this folder and its array layout."""
    digest = hashlib.blake2b(digest_size=7)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(repr(sorted((name, value) for name, value in vars(layout).items() if name.isupper())).encode())
    return int.from_bytes(digest.digest(), "big") | 1


def _call_once(functions: CompiledFunctions, sources: int) -> None:
    """Call each function once: numba compiles for the types of the first call.

    Raises RuntimeError for a stale cache.
    """
    one = np.full(1, -1.0)
    columns = batch_columns(TokenInputs(one, one, np.array([0, 1], np.int64))).columns
    rollout = RolloutSums.empty(1)
    state = new_state(
        rollout.sums, np.zeros((1, 2)), np.zeros((1, layout.ROLLOUT_COUNTS), np.int64), np.zeros((1, layout.ID_COLUMNS))
    )
    found = functions.sum_lane(columns, lookups(), state, 0, 1), functions.sum_verl_lane(columns, state, 0, 1)
    if found != (sources, sources):
        raise RuntimeError("the machine code in numba's cache was compiled from other sources")
    ids, sums = np.zeros(1, np.int64), np.zeros((1, 3))
    functions.merge_tables(state.token_ids[None], ids, ids.copy(), sums, sums.copy())
