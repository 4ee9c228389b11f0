"""The texts of token ids, by a vocabulary: a tokenizer of the operator's folder (FORESHOCK_TOKENIZERS_FOLDER)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from foreshock.errors import WeightsError
from foreshock.vocabulary import FILE_NAME, vocabulary_of

DEEPEST = 3
"""Most folders below the root: owner, name and revision."""


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


def configured_vocabulary(root: str, names: Sequence[str]) -> Sequence[str] | None:
    """Return the vocabulary of the first of these names below the root; None if there is none that can be read."""
    known = known_tokenizers(root)
    file = next((known[name] for name in names if name in known), None)
    return None if file is None else _load(file, file.stat().st_mtime_ns)


def texts_of(vocabulary: Sequence[str], token_ids: Iterable[int]) -> dict[int, str]:
    """Return the text of each token id; of an id beyond the vocabulary the number, as `‹7›`."""
    size = len(vocabulary)
    return {each: (each < size and vocabulary[each]) or f"‹{each}›" for each in set(token_ids)}


def unknown_in(texts: Mapping[int, str]) -> int:
    return sum(text == f"‹{token_id}›" for token_id, text in texts.items())


@lru_cache(maxsize=4)
def _load(file: Path, modified_ns: int) -> Sequence[str] | None:
    """Return a vocabulary; `modified_ns` is part of the cache key, so that a replaced file is read again."""
    try:
        return vocabulary_of(file)
    except WeightsError:
        return None
