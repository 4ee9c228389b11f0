"""Failures of the service: its disk, its database, its judge, and what it is asked."""

from __future__ import annotations

from benchmarks.failures.rows import Row

ROWS: list[Row] = []
