"""Addresses of a run's pages: `/runs/{project}/{key}`."""

from __future__ import annotations

from urllib.parse import quote

__all__ = ["run_page_path"]


def run_page_path(project: str, key: str) -> str:
    """Return the path of a run's page; a step's is the same with `/steps/{step}`."""
    return f"/runs/{quote(project, safe='')}/{quote(key, safe='')}"
