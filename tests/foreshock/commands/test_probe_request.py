"""What `foreshock probe` requests for the words of a command line, read by its own parser."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from foreshock.commands.probe import ProbeCommand, _request
from foreshock.errors import ConfigurationError
from foreshock.probe_kinds import DOCTOR, LAYERS, ROUTING


def request(*options: str) -> dict[str, Any]:
    """Return the request for `foreshock probe RUN 60 OPTIONS`."""
    command = ProbeCommand()
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
