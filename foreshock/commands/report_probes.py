"""The lines of probe results: two scorers compared by layer or by routed experts.

The functions `…_of_answer` are named by the rows of `foreshock/probe_kinds.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from foreshock.api.records import parse
from foreshock.commands.text import count, number, table, wrap
from foreshock.comparisons import comparison_name
from foreshock.interval_names import RANGE, ends_in_words
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.routing import LayerRouting, RoutedTokens, RoutingMeasures
from foreshock.routing import RoutingComparison
from foreshock.scorers import score_name


def layers_of_answer(answer: Mapping[str, Any], probe: Mapping[str, Any]) -> list[str]:
    """Return the places of the network from the embeddings to the head, and what the comparison shows."""
    pair = comparison_name(*(scorer["scorer"] for scorer in probe["scorers"]))
    comparison = next(each for each in answer["items"] if each["pair"] == pair)
    sizes = f"{count(comparison['states'])} states of {comparison['rollouts']} rollouts"
    lines = ["", f"  Hidden states of {comparison['compared']} against {comparison['reference']}, {sizes}:"]
    header = ["place", "relative L2", RANGE, "p99", "noise floor", ""]
    lines += table(header, [_compared_row(layer) for layer in comparison["layers"]], left=(0, 5), indent="    ")
    if comparison["non_finite"]:
        lines += wrap(f"{comparison['non_finite']} states left out: a distance is NaN or infinite.", "    ")
    return [*lines, *wrap(str(comparison["sentence"]), "    ", "  → ")]


def _compared_row(layer: Mapping[str, Any]) -> list[str]:
    distance = layer["distance"]
    found = distance["relative_l2"]
    floors = [layer[side]["relative_l2"]["mean"] for side in ("compared_floor", "reference_floor")]
    return [
        str(layer["name"]),
        number(found["mean"]),
        "" if found["low"] is None else f"{number(found['low'])} … {number(found['high'])}",
        number(distance["relative_l2_p99"]),
        number(None if None in floors else max(floors)),
        "departs" if layer["departs"] else "",
    ]


def routing_of_answer(answer: Mapping[str, Any], probe: Mapping[str, Any]) -> list[str]:
    """Return the agreement of each layer, and k3 and |d| of tokens with and without a difference."""
    names = [score_name(each["scorer"], each["variant"]) for each in probe["scorers"]]
    item = next(each for each in answer["items"] if [each["target"], each["behaviour"]] == names)
    comparison = parse(RoutingComparison, item)
    found = comparison.measures
    lines = [
        "",
        (
            f"  Routed experts of {comparison.target} (π) and {comparison.behaviour} (μ), {found.top_k} per token and "
            f"layer, {count(found.all_tokens.tokens)} tokens of {found.groups} prompts:"
        ),
    ]
    header = ["layer", "agreement", RANGE, "overlap", "first differences"]
    lines += table(header, [_routed_row(each) for each in found.layers], indent="    ")
    parts = {
        "the same experts in all layers": found.agreeing,
        "other experts in any layer": found.differing,
        "all": found.all_tokens,
    }
    header = ["tokens with", "tokens", "k3_kl", RANGE, "mean |d|"]
    lines += ["", *table(header, [_part_row(*each) for each in parts.items()], left=(0,), indent="    ")]
    if found.excluded:
        lines += wrap(f"{count(found.excluded)} tokens left out: no state before them, or no log-prob.", "    ")
    return [*lines, *wrap(_in_words(found), "    ", "  → ")]


def _in_words(found: RoutingMeasures) -> str:
    share = found.any_difference
    if not found.all_tokens.tokens:
        return "No token has a log-prob and experts of both scorers."
    if share.mean == 0.0:
        return f"All {count(found.all_tokens.tokens)} tokens have the same experts in all layers."
    first = max(found.layers, key=lambda each: each.first_differences.mean)
    return (
        f"{_percent(share.mean)} of the tokens{_bounds(share)} have other experts in at least one layer, most of them "
        f"first in layer {first.layer}; they carry {_percent(found.k3_share.mean)} of the sum of "
        f"k3{_bounds(found.k3_share)}."
    )


def _routed_row(layer: LayerRouting) -> list[str]:
    return [
        str(layer.layer),
        _percent(layer.agreement.mean),
        _bounds(layer.agreement, "{} … {}"),
        _percent(layer.overlap.mean),
        _percent(layer.first_differences.mean),
    ]


def _part_row(name: str, part: RoutedTokens) -> list[str]:
    bounds = ""
    if math.isfinite(part.k3_kl.low):
        bounds = ends_in_words(part.k3_kl.mean, part.k3_kl.low, part.k3_kl.high, number, " … ")
    return [name, count(part.tokens), number(part.k3_kl.mean), bounds, number(part.abs_d.mean)]


def _bounds(share: Interval, form: str = f" ({RANGE} {{}} to {{}})") -> str:
    return form.format(_percent(share.low), _percent(share.high)) if math.isfinite(share.low) else ""


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100.0 * share:.4g} %"
