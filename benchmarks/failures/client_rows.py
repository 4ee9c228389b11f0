"""Failures of what runs in the trainer: the client, its spool, its integrations, and what they send."""

from __future__ import annotations

from benchmarks.failures.rows import Row

ROWS: list[Row] = []
