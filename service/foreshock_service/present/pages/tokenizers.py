"""The texts of token ids, by the tokenizers that the operator provides (FORESHOCK_TOKENIZERS_FOLDER)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FILE_NAME = "tokenizer.json"
LARGEST_FILE_BYTES = 64 << 20
DEEPEST = 3
"""Most folders below the root: owner, name and revision."""
_KEPT = 4
_UNDECODABLE = "\ufffd"
_SPACE_MARK = "\u2581"


def known_tokenizers(root: str) -> dict[str, Path]:
    """Return the tokenizer files below the root by the name of their folder, such as `Qwen/Qwen3-8B`."""
    if not root:
        return {}
    folder = Path(root)
    patterns = ("/".join(["*"] * depth + [FILE_NAME]) for depth in range(1, DEEPEST + 1))
    return {
        found.parent.relative_to(folder).as_posix(): found for pattern in patterns for found in folder.glob(pattern)
    }


def announced_names(fingerprints: Iterable[Mapping[str, Any]], model: str | None) -> list[str]:
    """Return the names by which a run announces its tokenizer, the preferred one first."""
    named = [each["tokenizer"] for each in fingerprints if isinstance(each.get("tokenizer"), str)]
    return [*named, *([model] if model else [])]


def texts_of(root: str, names: Sequence[str], token_ids: Iterable[int]) -> dict[int, str] | None:
    """Return the text of each token id; None if no tokenizer of these names is configured."""
    known = known_tokenizers(root)
    file = next((known[name] for name in names if name in known), None)
    if file is None:
        return None
    status = file.stat()
    if status.st_size > LARGEST_FILE_BYTES:
        return None
    tokenizer = _load(file, status.st_mtime_ns)
    return {token_id: _text(tokenizer, token_id) for token_id in set(token_ids)}


@lru_cache(maxsize=_KEPT)
def _load(file: Path, modified_ns: int) -> Tokenizer:
    """Return the tokenizer; `modified_ns` is part of the cache key, so that a replaced file is read again."""
    return Tokenizer.from_file(str(file))


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token as it appears in a text; a partial character as in the vocabulary, an unknown id as `‹7›`."""
    piece: str | None = tokenizer.id_to_token(token_id)
    if piece is None:
        return f"‹{token_id}›"
    if piece.startswith(_SPACE_MARK):
        return piece.replace(_SPACE_MARK, " ")
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return piece if _UNDECODABLE in text or not text else text
