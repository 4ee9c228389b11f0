"""The table of a comparison by layer: where in the network two scorers depart."""

from collections.abc import Mapping
from typing import Any

from foreshock.commands.text import count, number, table, wrap
from foreshock.comparisons import comparison_name
from foreshock.interval_names import RANGE


def layers_of_answer(answer: Mapping[str, Any], probe: Mapping[str, Any]) -> list[str]:
    """Return the lines of the comparison that the probe asked for."""
    pair = comparison_name(*(scorer["scorer"] for scorer in probe["scorers"]))
    return layers_lines(next(each for each in answer["items"] if each["pair"] == pair))


def layers_lines(comparison: Mapping[str, Any]) -> list[str]:
    """Return the places of the network from the embeddings to the head, and what the comparison shows."""
    sizes = f"{count(comparison['states'])} states of {comparison['rollouts']} rollouts"
    lines = ["", f"  Hidden states of {comparison['compared']} against {comparison['reference']}, {sizes}:"]
    header = ["place", "relative L2", RANGE, "p99", "cosine distance", "noise floor", ""]
    lines += table(header, [_row(layer) for layer in comparison["layers"]], left=(0, 6), indent="    ")
    if comparison["non_finite"]:
        lines += wrap(f"{comparison['non_finite']} states left out: a distance is NaN or infinite.", "    ")
    return [*lines, *wrap(str(comparison["sentence"]), "    ", "  → ")]


def _row(layer: Mapping[str, Any]) -> list[str]:
    distance = layer["distance"]
    found = distance["relative_l2"]
    floors = [layer[side]["relative_l2"]["mean"] for side in ("compared_floor", "reference_floor")]
    return [
        str(layer["name"]),
        number(found["mean"]),
        "" if found["low"] is None else f"{number(found['low'])} … {number(found['high'])}",
        number(distance["relative_l2_p99"]),
        number(distance["cosine"]["mean"]),
        number(None if None in floors else max(floors)),
        "departs" if layer["departs"] else "",
    ]
