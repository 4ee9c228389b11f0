"""The text of each token id, read from a tokenizer's file."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from foreshock.errors import WeightsError
from foreshock.vocabulary import LONGEST_TEXT, vocabulary_of


def test_texts_are_those_of_a_response(tmp_path: Path) -> None:
    vocabulary = {"Ġhello": 0, "Ã": 1, "!" * 300: 2, "Ċ": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="Ã"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = vocabulary_of(tmp_path / "tokenizer.json")
    assert texts[:3] == [" hello", "Ã", "!" * LONGEST_TEXT], "part of a character is shown as in the vocabulary"
    assert texts[5] == "\n"
    assert "<|end|>" in texts
    assert texts[3] in ("", "<|end|>"), "an id that the tokenizer does not have is empty"


def test_file_that_is_no_tokenizer_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match="is not a tokenizer"):
        vocabulary_of(tmp_path / "tokenizer.json")
