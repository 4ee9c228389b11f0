"""Prompts: of a file, of the model's tokenizer, or random token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foreshock.errors import ConfigurationError
from foreshock.parsing import parse_json
from foreshock.rollouts import RolloutBatch

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_SHORTEST, _LONGEST = 4, 24
_SEED = 2026
"""Seed of random prompts. All certificates of a model use the same prompts, so that they can be paired."""
_TEXTS = (
    "What is 17 + 25?",
    "Solve for x: 3x + 4 = 19. Think step by step.",
    "Name three rivers in Europe.",
    "Write a function that reverses a list.",
    "The capital of Japan is",
    "Explain why the sky is blue to a child.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey?",
    "Translate into French: the cat sleeps on the table.",
)


def prompts_of(folder: Path, file: Path | None, count: int, vocabulary: int, most: int) -> tuple[list[list[int]], str]:
    """Return `count` prompts of at most `most` tokens, and where they come from with what was left out.

    A line of `file` is text, for which the model needs a tokenizer, or a JSON list of token ids. Raises
    ConfigurationError if no prompt is usable.
    """
    if file is None:
        tokenizer = _tokenizer(folder)
        if tokenizer is not None:
            found = [
                _encoded(tokenizer, _TEXTS[each % len(_TEXTS)] * (1 + each // len(_TEXTS))) for each in range(count)
            ]
            if all(found) and max(map(max, found)) < vocabulary:
                return [each[:most] for each in found], "prompts made with the model's tokenizer"
        random = np.random.default_rng(_SEED)
        ids = [random.integers(0, vocabulary, random.integers(_SHORTEST, _LONGEST)).tolist() for _ in range(count)]
        return [each[:most] for each in ids], "prompts of random token ids, as the model has no usable tokenizer"
    found = _read(folder, file)
    wrong = next((row for row, each in enumerate(found) if any(not 0 <= id_ < vocabulary for id_ in each)), None)
    if wrong is not None:
        raise ConfigurationError(f"{file}, line {wrong + 1}: the model's token ids are 0 to {vocabulary - 1}")
    usable = [each for each in found if 0 < len(each) <= most]
    if not usable:
        raise ConfigurationError(f"{file} has no prompt of 1 to {most} tokens, which fit into the model's context")
    left_out = (
        f"; {len(found) - len(usable)} left out: no tokens, or more than {most}" if len(usable) < len(found) else ""
    )
    return usable[:count], f"{min(len(usable), count)} prompts of {file.name}{left_out}"


def long_prompts(prompts: Sequence[Sequence[int]], length: int, count: int) -> list[list[int]]:
    """Return prompts of `length` tokens: those given, one after another, each starting with another one."""
    found = []
    for start in range(count):
        tokens: list[int] = []
        while len(tokens) < length:
            for each in (*prompts[start:], *prompts[:start]):
                tokens += each
        found.append(tokens[:length])
    return found


def batch_of(prompts: Sequence[Sequence[int]]) -> RolloutBatch:
    """Return the prompts as rollouts without a response; each is a group of its own."""
    names = [f"p{row}" for row in range(len(prompts))]
    return RolloutBatch.from_lists(names, prompts, [[] for _ in prompts], group_ids=names)


def _read(folder: Path, file: Path) -> list[list[int]]:
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts {file} cannot be read: {error}") from None
    tokenizer = None
    found: list[list[int]] = []
    for number, line in enumerate(lines):
        if line.lstrip().startswith("["):
            try:
                ids = parse_json(line)
            except ValueError as error:
                raise ConfigurationError(f"{file}, line {number + 1}: not a JSON list of token ids ({error})") from None
            if not all(isinstance(each, int) for each in ids):
                raise ConfigurationError(f"{file}, line {number + 1}: token ids must be whole numbers")
            found.append(ids)
            continue
        tokenizer = tokenizer or _tokenizer(folder)
        if tokenizer is None:
            raise ConfigurationError(f"{file}, line {number + 1} is text, and {folder} has no tokenizer that loads")
        found.append(_encoded(tokenizer, line))
    return found


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    # For a folder without these files, transformers makes an empty tokenizer of the model's kind.
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:
        # It fails in many ways, by its kind and its files.
        return None


def _encoded(tokenizer: Any, text: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        return list(found if isinstance(found, list) else found["input_ids"])
    return list(tokenizer.encode(text))
