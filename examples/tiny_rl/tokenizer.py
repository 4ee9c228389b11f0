"""The task's characters as a tokenizer file, so that pages show text instead of token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, models

from examples.tiny_rl.task import CHARACTERS

__all__ = ["TOKENIZER", "write_tokenizer"]

TOKENIZER: Final = "tiny-sums"
"""The name by which a run announces it."""
_PAD, _END = "<pad>", "<end>"


def write_tokenizer(root: Path) -> None:
    """Write `<TOKENIZER>/tokenizer.json` below `root`, as FORESHOCK_TOKENIZERS_FOLDER expects it."""
    pieces = (_PAD, _END, *CHARACTERS)
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    folder = root / TOKENIZER
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD)).save(str(folder / "tokenizer.json"))
