"""Grafana dashboards written in Python, and what Prometheus is told. `python -m dashboards.generate` writes them."""

from __future__ import annotations
