"""Connections of Foreshock to trainers, one module per framework. None is imported until it is used."""

from __future__ import annotations

from typing import Final

__all__ = ["KNOWN_VERSIONS"]

KNOWN_VERSIONS: Final = {"verl": "0.9", "trl": "1.16", "slime": "0.3", "vime": "0.2", "miles": "0.1"}
"""Releases whose source the modules follow; the documents say which of them were run."""
