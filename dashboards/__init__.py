"""Grafana dashboards and Prometheus rules in Python; `python -m dashboards.generate` writes their files."""

from __future__ import annotations
