"""The tokenizer's file gives the service the same text as the task."""

from __future__ import annotations

from pathlib import Path

from examples.tiny_rl.task import CHARACTERS, END_OF_SEQUENCE, PAD, decode, encode
from examples.tiny_rl.tokenizer import TOKENIZER, write_tokenizer
from foreshock_service.present.pages.rendering import announced_names, texts_of


def test_text_of_each_token_is_the_tasks(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_tokenizer(tmp_path)  # a second start of the demo
    names = announced_names([{"tokenizer": TOKENIZER}], "another model")
    ids = encode(CHARACTERS)
    texts = texts_of(str(tmp_path), names, [*ids, PAD, END_OF_SEQUENCE])
    assert texts is not None
    assert "".join(texts[token_id] for token_id in ids) == decode(ids) == CHARACTERS
    assert texts[PAD] == "<pad>"
    assert texts[END_OF_SEQUENCE] == "<end>"
