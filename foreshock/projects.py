"""The project of a run that names none."""

from __future__ import annotations

__all__ = ["DEFAULT_PROJECT"]

DEFAULT_PROJECT = "default"
