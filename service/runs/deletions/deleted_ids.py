"""Ids of deleted rollouts, of which only digests are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeletedIds:
    """Digests of the sample ids and group ids of a run whose rollouts are deleted."""

    run_id: str
    samples: frozenset[str]
    groups: frozenset[str]

    @classmethod
    def of(cls, run_id: str, sample_ids: Iterable[str], group_ids: Iterable[str]) -> DeletedIds:
        """Return the digests of these ids."""
        digests = [frozenset(_digest(run_id, text) for text in ids) for ids in (sample_ids, group_ids)]
        return cls(run_id, *digests)

    def rows(self, sample_ids: Sequence[str | None], group_ids: Sequence[str | None] | None) -> list[bool]:
        """Return for each rollout whether it is deleted, by its own id or by that of its group."""
        groups = group_ids if group_ids is not None else [None] * len(sample_ids)
        known = {group: self._has(self.groups, group) for group in set(groups)}
        return [
            self._has(self.samples, sample) or known[group] for sample, group in zip(sample_ids, groups, strict=True)
        ]

    def has_group(self, group_id: str | None) -> bool:
        """Return whether the rollouts of a group are deleted."""
        return self._has(self.groups, group_id)

    def _has(self, digests: frozenset[str], text: str | None) -> bool:
        return bool(digests) and text is not None and _digest(self.run_id, text) in digests


def _digest(run_id: str, text: str) -> str:
    # With the run's random id: equal ids of two runs have other digests.
    return hashlib.sha256(f"{run_id}\0{text}".encode()).hexdigest()
