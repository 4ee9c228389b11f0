"""The compiled functions, made once a process: from numba's cache on disk where that is possible, else anew."""

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
    """Machine code for every type of input."""

    sum_lane: LaneFunction
    sum_verl_lane: VerlLaneFunction
    merge_tables: MergeFunction


def compiled_functions() -> CompiledFunctions:
    """The functions, compiled at the first call (seconds; a fraction of one where numba has kept them)."""
    with _lock:
        return _made()


@functools.cache
def _made() -> CompiledFunctions:
    try:
        return _compile(cached=True)
    except Exception:
        # No folder that numba may write to, a full disk, or a file of its cache that was cut short, which its reader
        # answers with whatever its bytes lead to: the machine code lives in this process only. What is wrong with the
        # functions themselves is raised again here.
        return _compile(cached=False)


def _compile(*, cached: bool) -> CompiledFunctions:
    sources = digest_of_sources()
    made = CompiledFunctions(
        lane_function(sources, cached=cached),
        verl_lane_function(sources, cached=cached),
        merge_function(sources, cached=cached),
    )
    _try_out(made, sources)
    return made


def digest_of_sources() -> int:
    """A number that changes with anything that is built into the machine code: this package and its layout."""
    digest = hashlib.blake2b(digest_size=7)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(repr(sorted((name, value) for name, value in vars(layout).items() if name.isupper())).encode())
    return int.from_bytes(digest.digest(), "big") | 1


def _try_out(made: CompiledFunctions, sources: int) -> None:
    """Numba compiles for the types of a first call."""
    one = np.full(1, -1.0)
    columns = batch_columns(TokenInputs(one, one, np.array([0, 1], np.int64))).columns
    rollout = RolloutSums.empty(1)
    state = new_state(
        rollout.sums, np.zeros((1, 2)), np.zeros((1, layout.ROLLOUT_COUNTS), np.int64), np.zeros((1, layout.ID_COLUMNS))
    )
    found = made.sum_lane(columns, lookups(), state, 0, 1), made.sum_verl_lane(columns, state, 0, 1)
    if found != (sources, sources):
        raise RuntimeError("the machine code in numba's cache was made of other sources")
    ids, sums = np.zeros(1, np.int64), np.zeros((1, 3))
    made.merge_tables(state.token_ids[None], ids, ids.copy(), sums, sums.copy())
