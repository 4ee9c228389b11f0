"""The configurations of a matrix: cells of a scorer and its options, and the grid that is replayed by default."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreshock.errors import ConfigurationError
from foreshock.scorers import ENGINE_REPLAY, REFERENCE, SCORERS, TRAINER_REPLAY

MOST_CELLS = 32
VARIATION_EXAMPLE = f"{TRAINER_REPLAY}:head_dtype=null,float32"

# One change at a time from the scorer's defaults, which are the run's own settings if it declares them.
DEFAULT_VARIATIONS: dict[str, tuple[Mapping[str, Any], ...]] = {
    ENGINE_REPLAY: (
        {"head_dtype": "float32"},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"kv_cache_dtype": "fp8"},
        {"batch_size": 8},
        {"enforce_eager": False},
        {"chunked_prefill": True, "max_num_batched_tokens": 256},
        {"prefix_caching": True},
    ),
    TRAINER_REPLAY: (
        {"head_dtype": "float32"},
        {"autocast": None, "master_dtype": "bfloat16"},
        {"autocast": "float16"},
        {"autocast": None, "master_dtype": "float32"},
        {"attention_implementation": "eager"},
        {"padding": "none"},
        {"batch_size": 8},
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A scorer with options; without options it runs with its defaults."""

    scorer: str
    options: Mapping[str, Any] = field(default_factory=dict)


def default_cells(scorers: Sequence[str] = ()) -> list[Cell]:
    """Return the reference, and for each scorer its defaults and `DEFAULT_VARIATIONS`; by default all that have any.

    Raises ConfigurationError for a scorer that workers cannot run.
    """
    return cells_of_grid(
        [(name, each) for name in scorers or DEFAULT_VARIATIONS for each in ({}, *DEFAULT_VARIATIONS.get(name, ()))]
    )


def parse_variation(text: str) -> tuple[str, str, list[Any]]:
    """Return scorer, option and values of `SCORER:OPTION=VALUE,VALUE`; values are words or JSON, such as null and 8.

    Raises ConfigurationError.
    """
    name, _, values = text.partition("=")
    scorer, _, option = name.partition(":")
    if not (scorer and option and values):
        raise ConfigurationError(
            f"a variation must be SCORER:OPTION=VALUE,VALUE, such as {VARIATION_EXAMPLE}, got {text!r}"
        )
    return scorer, option, [option_value(word) for word in values.split(",")]


def cells_of_grid(cells: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Cell]:
    """Return the cells without repetitions, each scorer's defaults before its other cells, the reference first.

    Raises ConfigurationError for a scorer that workers cannot run, or more than `MOST_CELLS` cells.
    """
    asked = list(cells)
    names = dict.fromkeys([REFERENCE, *(scorer for scorer, _ in asked)])
    for name in names:
        if name not in SCORERS or SCORERS[name].engine is None:
            raise ConfigurationError(f"{name!r} is no scorer that workers run")
    found: list[Cell] = []
    for name in names:
        for cell in (Cell(name), *(Cell(name, options) for scorer, options in asked if scorer == name)):
            if cell not in found:
                found.append(cell)
    if len(found) > MOST_CELLS:
        raise ConfigurationError(f"a matrix has at most {MOST_CELLS} cells, got {len(found)}: vary fewer options")
    return found


def product_of(variations: Iterable[tuple[str, str, list[Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return every combination of the values of each scorer's options."""
    by_scorer: dict[str, dict[str, list[Any]]] = {}
    for scorer, option, values in variations:
        by_scorer.setdefault(scorer, {})[option] = values
    return [
        (scorer, dict(zip(options, values, strict=True)))
        for scorer, options in by_scorer.items()
        for values in itertools.product(*options.values())
    ]


def option_value(word: str) -> Any:
    """Return the value of an option of a scorer: JSON, such as null and 8, or else the word itself."""
    try:
        return json.loads(word)
    except ValueError:
        return word
