"""The text of comparisons by layer and of routed experts."""

import argparse
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.api.records import to_json
from foreshock.commands.probe import _request, command
from foreshock.commands.report_probes import layers_of_answer, routing_of_answer
from foreshock.errors import ConfigurationError
from foreshock.measures.routing import measure_routing
from foreshock.probe_kinds import DOCTOR, LAYERS, ROUTING
from foreshock.routing import RoutingComparison


def mean(value: float | None) -> dict[str, float | None]:
    return {"mean": value, "low": None if value is None else value / 2, "high": None if value is None else value * 2}


def layer(name: str, level: float | None, *, departs: bool = False) -> dict[str, Any]:
    distance = {"relative_l2": mean(level), "relative_l2_p99": level}
    floors = [{"relative_l2": mean(value)} for value in (1e-7, 3e-7)]
    return {"name": name, "distance": distance, "compared_floor": floors[0], "reference_floor": floors[1],
            "departs": departs}  # fmt: skip


def test_table_has_a_row_for_each_place() -> None:
    comparison = {
        "pair": "torch.trainer/torch.float32",
        "compared": "torch.trainer",
        "reference": "torch.float32",
        "states": 4321,
        "rollouts": 64,
        "non_finite": 2,
        "layers": [layer("embeddings", None), layer("layers.0", 1.5e-3, departs=True), layer("norm", 2e-3)],
        "sentence": "They depart first at layers.0.",
    }
    probe = {"scorers": [{"scorer": "torch.trainer"}, {"scorer": "torch.float32"}]}
    lines = layers_of_answer({"items": [comparison]}, probe)
    assert lines[1] == "  Hidden states of torch.trainer against torch.float32, 4,321 states of 64 rollouts:"
    (row,) = [line.split() for line in lines if line.strip().startswith("layers.0")]
    assert row == ["layers.0", "0.00150", "7.50e-4", "…", "0.00300", "0.00150", "3.00e-7", "departs"]
    assert any("2 states left out" in line for line in lines)
    assert lines[-1] == "  → They depart first at layers.0."
    assert max(map(len, lines)) <= 100


TOKENS = 400


def lines(differing: NDArray[Any], d: NDArray[np.float64]) -> str:
    """Return the text for routes that differ at the tokens `differing` in layer 7 of 3 and 7."""
    target = np.zeros((TOKENS, 2, 2), np.int16)
    target[:, :, 1] = 1
    behaviour = target.copy()
    behaviour[differing, 1, 1] = 2
    zeros = np.zeros(TOKENS)
    found = measure_routing(target, behaviour, d, zeros, np.arange(41) * 10, layers=[3, 7])
    made = {"engine": "torch"}
    comparison = RoutingComparison(
        target="torch.trainer", behaviour="vllm.prefill", target_fingerprint=made, behaviour_fingerprint=made,
        measures=found,
    )  # fmt: skip
    scorers = [{"scorer": name, "variant": ""} for name in ("torch.trainer", "vllm.prefill")]
    return "\n".join(routing_of_answer({"items": [to_json(comparison)]}, {"scorers": scorers}))


def test_text_names_the_layer_and_the_cost() -> None:
    rows = np.arange(0, TOKENS, 8)
    d = np.zeros(TOKENS)
    d[rows] = -0.2
    text = lines(rows, d)
    assert "Routed experts of torch.trainer (π) and vllm.prefill (μ), 2 per token and layer, 400 tokens" in text
    cells = [row.split() for row in text.splitlines()]
    assert ["3", "100", "%", "100", "%", "…", "100", "%", "100", "%", "0", "%"] in cells
    (seventh,) = [row for row in cells if row[:3] == ["7", "87.5", "%"]]
    assert seventh[-4:] == ["93.75", "%", "12.5", "%"]
    assert "12.5 % of the tokens" in text
    assert "most of them first in layer 7" in " ".join(text.split())
    assert "they carry 100 % of the sum of k3" in " ".join(text.split())
    (row,) = [row for row in text.splitlines() if "other experts in any layer" in row]
    assert " 50 " in row
    assert row.rstrip().endswith("0.200")


def test_text_of_equal_routes_says_so() -> None:
    text = lines(np.zeros(0, np.int64), np.full(TOKENS, -0.1))
    assert "All 400 tokens have the same experts in all layers." in text
    assert "NaN" not in text
    assert "nan" not in text


def request(*options: str) -> dict[str, Any]:
    """Return the request for `foreshock probe RUN 60 OPTIONS`."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return _request(parser.parse_args(["run", "60", *options]))


@pytest.mark.parametrize(("option", "kind"), [("--layers", LAYERS.name), ("--routing", ROUTING.name)])
def test_comparison_leaves_the_scorers_to_the_service(option: str, kind: str) -> None:
    assert request(option) == {"step": 60, "scorers": [], "kind": kind}


def test_comparison_names_the_scorers_in_their_order() -> None:
    words = ("--scorer", "torch.trainer", "--scorer", "torch.bfloat16", "--trainer-autocast", "none")
    asked = request("--layers", *words, "--max-rollouts", "8")
    assert [each["scorer"] for each in asked["scorers"]] == ["torch.trainer", "torch.bfloat16"]
    assert asked["options"] == {"torch.trainer": {"autocast": None}}


def test_examination_by_the_doctor_names_no_scorers() -> None:
    assert request("--doctor") == {"step": 60, "kind": DOCTOR.name, "scorers": []}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--doctor --trainer-autocast none", "--doctor makes replays of its own"),
        ("--doctor --exact", "--exact and --doctor are different probes"),
        ("--layers --exact", "--exact and --layers are different probes"),
        ("--layers --routing", "--layers and --routing are different probes"),
        ("--routing --exact", "--exact and --routing are different probes"),
    ],
)
def test_options_of_another_probe_are_refused(options: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        request(*options.split())
