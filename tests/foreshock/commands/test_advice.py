"""`foreshock advice`, with the real service."""

import argparse
import json
from pathlib import Path

import pytest

from foreshock import Client
from foreshock.commands.advice import command
from tests.foreshock.batches import random_batch
from tests.foreshock.running_service import RunningService


def test_each_lever_is_a_line(real_service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(real_service.url, run_key="advised", spool_directory=tmp_path) as client:
        client.start_run(correction_mode="apply")
        client.log_rollouts(1, random_batch(1, rollouts=16))
        assert client.flush(60)
    parser = argparse.ArgumentParser()
    command.configure(parser)
    words = ["advised", "--url", real_service.url]
    assert command.run(parser.parse_args(words)) == 0
    rate, correction, rollback = (line for line in capsys.readouterr().out.splitlines() if not line.startswith("  "))
    assert rate.startswith("rate (shadow): × 1, shown only, the trainer gets 1.0.")
    # Random log-probs are faulty data, of which the lint has a critical finding: they advise nothing.
    assert correction == "correction (apply): No correction: the loss is as the trainer is configured."
    assert rollback == "rollback (shadow): No rollback is proposed."
    assert command.run(parser.parse_args([*words, "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["advice"]["correction"]["mode"] == "apply"
