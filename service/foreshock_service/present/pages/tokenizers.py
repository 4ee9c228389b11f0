"""The texts of token ids, by a vocabulary: a tokenizer of the operator's folder (FORESHOCK_TOKENIZERS_FOLDER)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from foreshock.errors import WeightsError
from foreshock.vocabulary import FILE_NAME, vocabulary_of

DEEPEST = 3
"""Most folders below the root: owner, name and revision."""


def announced_vocabulary(
    root: str, fingerprints: Iterable[Mapping[str, Any]], model: str | None
) -> Sequence[str] | None:
    """Return the vocabulary of the tokenizer that a run announces, else of its model; None if none can be read.

    A tokenizer is known by the name of its folder below the root, such as `Qwen/Qwen3-8B`.
    """
    folder, names = Path(root), [each.get("tokenizer") for each in fingerprints]
    patterns = ("/".join(["*"] * depth + [FILE_NAME]) for depth in range(1, DEEPEST + 1)) if root else ()
    files = (found for pattern in patterns for found in folder.glob(pattern))
    known = {found.parent.relative_to(folder).as_posix(): found for found in files}
    file = next((known[name] for name in (*names, model) if isinstance(name, str) and name in known), None)
    return None if file is None else _load(file, file.stat().st_mtime_ns)


def texts_of(vocabulary: Sequence[str], token_ids: Iterable[int]) -> dict[int, str]:
    """Return the text of each token id; of an id beyond the vocabulary the number, as `‹7›`."""
    size = len(vocabulary)
    return {each: (each < size and vocabulary[each]) or f"‹{each}›" for each in set(token_ids)}


@lru_cache(maxsize=4)
def _load(file: Path, modified_ns: int) -> Sequence[str] | None:
    """Return a vocabulary; `modified_ns` is part of the cache key, so that a replaced file is read again."""
    try:
        return vocabulary_of(file)
    except WeightsError:
        return None
