"""Collect the evidence of a batch, in pieces of a few hundred thousand tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.evidence.after_id import mismatch_after_ids
from foreshock.lint.evidence.alignment import count_alignment
from foreshock.lint.evidence.builder import EvidenceBuilder
from foreshock.lint.evidence.fields import COLUMNS
from foreshock.lint.evidence.group_sums import GROUP_COLUMNS, GroupSums, keys_of_texts
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.evidence.missing_log_probs import count_masked_values, missing_by_token_id
from foreshock.lint.evidence.pairs import count_pairs
from foreshock.lint.evidence.pieces import Piece, iterate_pieces
from foreshock.lint.evidence.rollout_hashes import hash_rollouts
from foreshock.lint.evidence.sampling_parameters import count_sampling_parameters
from foreshock.lint.evidence.surprisal import sum_surprisals
from foreshock.lint.evidence.values import count_rounding, count_values
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["collect_evidence"]


# Invalid log-probs overflow in exponentials. The results are not finite, and the checks handle that.
@np.errstate(all="ignore")
def collect_evidence(batch: RolloutBatch) -> LintEvidence:
    """Return the evidence of a batch. Only the shape of the batch has to be valid, not its values."""
    builder = EvidenceBuilder()
    generated = int(batch.generated_lengths.sum())
    builder.count(rollouts=batch.num_rollouts, tokens=generated, tool_tokens=batch.num_tokens - generated)
    count_sampling_parameters(batch, builder)
    group_sums = np.zeros((batch.num_rollouts, len(GROUP_COLUMNS)))
    group_tokens = np.zeros(batch.num_rollouts, np.int64)
    for piece in iterate_pieces(batch):
        rows = slice(piece.first_row, piece.first_row + piece.offsets.size - 1)
        finite = {name: count_values(batch, piece, name, builder) for name in COLUMNS}
        group_sums[rows, 0] = sum_surprisals(_finite_only(piece, finite["rollout"]), builder)
        pairs = _finite_only(piece, finite["rollout"], finite["trainer"])
        if pairs.rollout is not None and pairs.trainer is not None:
            group_sums[rows, 1], group_sums[rows, 2] = count_pairs(batch, pairs, builder)
            group_tokens[rows] = np.diff(pairs.offsets)
    for name in COLUMNS:
        count_rounding(batch, name, builder)
    count_alignment(batch, builder)
    count_masked_values(batch, builder)
    missing = missing_by_token_id(batch, builder)
    after_ids = mismatch_after_ids(batch, builder, any_large=builder.counts["large"] > 0)
    groups = GroupSums.of(_group_keys(batch), group_tokens, group_sums)
    return LintEvidence.of(builder, groups, missing, after_ids, hash_rollouts(batch, builder))


def _finite_only(piece: Piece, *finite: NDArray[np.bool_] | None) -> Piece:
    """Return the piece without the tokens at which a mask is False; a mask of None keeps all."""
    masks = [mask for mask in finite if mask is not None]
    return piece.select(np.logical_and.reduce(masks)) if masks else piece


def _group_keys(batch: RolloutBatch) -> NDArray[np.uint64]:
    """Return the key of each rollout's prompt group, shape [N]; a rollout without a group is a group of its own."""
    groups = batch.group_ids or [None] * batch.num_rollouts
    names = [
        f"group {group}" if group is not None else f"rollout {sample_id}"
        for group, sample_id in zip(groups, batch.sample_ids, strict=True)
    ]
    return keys_of_texts(names)
