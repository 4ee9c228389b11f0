"""The workflow that certifies an engine in CI: it is short, and its command is one that the program takes."""

import argparse
import shlex

import yaml

from foreshock_probes.certify.command import CertifyCommand
from tests.paths import REPOSITORY

WORKFLOW = REPOSITORY / "examples" / "ci" / "certify.yml"


def test_the_workflow_has_at_most_30_lines_and_a_command_that_is_understood() -> None:
    text = WORKFLOW.read_text()
    assert len(text.splitlines()) <= 30
    steps = yaml.safe_load(text)["jobs"]["certify"]["steps"]
    command = shlex.split(next(each["run"] for each in steps if each.get("name") == "certify"))
    parser = argparse.ArgumentParser(exit_on_error=False)
    CertifyCommand().configure(parser)
    assert command[:2] == ["foreshock", "certify"]
    asked = parser.parse_args(command[2:])
    kept = next(each["with"]["path"] for each in steps if "with" in each).split()
    assert [str(each) for each in (asked.out, asked.html, asked.junit)] == kept
