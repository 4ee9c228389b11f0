"""The evidence of a batch, taken in one walk over its tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.alignment import count_alignment
from foreshock.lint.declared import count_declared
from foreshock.lint.dropped import count_masked, dropped_ids
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.ratios import count_pairs
from foreshock.lint.rollout_hashes import marks_of
from foreshock.lint.surprisal import surprisals_of
from foreshock.lint.tables import GroupSums, keys_of_texts
from foreshock.lint.tally import COLUMNS, Tally
from foreshock.lint.tokens import Piece, pieces_of
from foreshock.lint.values import count_rounding, count_values
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["gather_evidence"]


# Damaged numbers overflow here and there; what comes of them is not finite, and is judged so.
@np.errstate(all="ignore")
def gather_evidence(batch: RolloutBatch) -> LintEvidence:
    """What the lint sees in a batch, which need not be validated beyond its shape."""
    tally = Tally()
    generated = int(batch.generated_lengths.sum())
    tally.count(rollouts=batch.num_rollouts, tokens=generated, tool_tokens=batch.num_tokens - generated)
    count_declared(batch, tally)
    group_sums = np.zeros((batch.num_rollouts, 2))
    group_tokens = np.zeros(batch.num_rollouts, np.int64)
    for piece in pieces_of(batch):
        rows = slice(piece.first_row, piece.first_row + piece.offsets.size - 1)
        finite = {name: count_values(batch, piece, name, tally) for name in COLUMNS}
        group_sums[rows, 0] = surprisals_of(_finite_only(piece, finite["rollout"]), tally)
        pairs = _finite_only(piece, finite["rollout"], finite["trainer"])
        if pairs.rollout is not None and pairs.trainer is not None:
            group_sums[rows, 1] = count_pairs(batch, pairs, tally)
            group_tokens[rows] = np.diff(pairs.offsets)
    for name in COLUMNS:
        count_rounding(batch, name, tally)
    count_alignment(batch, tally)
    count_masked(batch, tally)
    dropped = dropped_ids(batch, tally)
    groups = GroupSums.of(_group_keys(batch), group_tokens, group_sums)
    return LintEvidence.of(tally, groups, dropped, marks_of(batch, tally))


def _finite_only(piece: Piece, *finite: NDArray[np.bool_] | None) -> Piece:
    """The piece without the tokens where one of the masks is False; a mask None means that all are finite."""
    masks = [mask for mask in finite if mask is not None]
    return piece.kept(np.logical_and.reduce(masks)) if masks else piece


def _group_keys(batch: RolloutBatch) -> NDArray[np.uint64]:
    """[N] the key of each rollout's prompt group; one without a group is its own."""
    groups = batch.group_ids or [None] * batch.num_rollouts
    names = [
        f"group {group}" if group is not None else f"rollout {sample_id}"
        for group, sample_id in zip(groups, batch.sample_ids, strict=True)
    ]
    return keys_of_texts(names)
