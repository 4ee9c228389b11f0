"""The text of each token id of a model, from the `tokenizer.json` beside its weights."""

from collections.abc import Sequence
from pathlib import Path

from foreshock.digests import canonical_json, digest_of_bytes
from foreshock.errors import WeightsError

FILE_NAME = "tokenizer.json"
LARGEST_FILE_BYTES = 64 << 20
LONGEST_TEXT = 200
"""Characters of a token's text; the rest of a longer one, such as a run of spaces, is cut."""
MOST_TOKENS = 1 << 20
_UNDECODABLE = "\ufffd"
_SPACE_MARK = "\u2581"


def vocabulary_of(file: Path) -> list[str]:
    """Return the text of each token id as it appears in a response; empty for an id that the tokenizer does not have.

    Part of a character is shown as in the vocabulary. Needs the package tokenizers. Raises WeightsError if the file
    cannot be read as a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        if file.stat().st_size > LARGEST_FILE_BYTES:
            raise WeightsError(f"{file.name} has more than {LARGEST_FILE_BYTES:,} bytes")
        tokenizer = Tokenizer.from_file(str(file))
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
    except WeightsError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        raise WeightsError(f"{file.name} is not a tokenizer: {error}") from error
    size = min(max(ids, default=-1) + 1, MOST_TOKENS)
    decoded = tokenizer.decode_batch([[each] for each in range(size)], skip_special_tokens=False)
    return [_text(tokenizer.id_to_token(each), text)[:LONGEST_TEXT] for each, text in enumerate(decoded)]


def digest_of_texts(texts: Sequence[str]) -> str:
    """Return the digest that names a vocabulary."""
    return digest_of_bytes(canonical_json(list(texts)).encode())


def _text(piece: str | None, decoded: str) -> str:
    if piece is None:
        return ""
    if piece.startswith(_SPACE_MARK):
        return piece.replace(_SPACE_MARK, " ")
    return piece if _UNDECODABLE in decoded or not decoded else decoded
