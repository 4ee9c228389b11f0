"""Write generated documents, or check that they are current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(script: str, texts: Mapping[Path, str]) -> int:
    """Write the texts of documents; with `--check`, only report those that are not current, and return 1 if any."""
    parser = argparse.ArgumentParser(prog=f"python -m scripts.{script}")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document is not current")
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if parser.parse_args().check:
        for path in stale:
            print(f"not current: {path}; run python -m scripts.{script}", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path])
    return 0
