"""`foreshock certify` with vLLM and torch on a tiny model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from foreshock.certify.certificate import read_certificate
from foreshock_probes.certify.command import certify
from tests.probes.tiny import save_checkpoint


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    certify.configure(parser)
    return certify.run(parser.parse_args(words))


def test_a_certificate_and_a_comparison_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out, again = save_checkpoint(tmp_path / "m", seed=1), tmp_path / "cert.json", tmp_path / "again.json"
    rows = ["trainer/vllm.prefill", "prefill", "prefix_cache", "restart", "seed", "top_p", "stop"]
    sizes = ["--rollouts", "8", "--tokens", "16"]
    assert command(str(model), "--out", str(out), "--rows", *rows, *sizes) == 0
    found = read_certificate(out)
    assert {row.name: row.verdict for row in found.rows if row.verdict not in ("identical", "rounding")} == {}
    assert found.row("restart").verdict == "identical"  # type: ignore[union-attr]
    assert {"engine_version", "device_name", "dtype"} <= set(found.fingerprints["vllm.prefill"])
    compared = ["prefill", "prefix_cache"]
    assert command(str(model), "--out", str(again), "--rows", *compared, *sizes, "--against", str(out)) == 0
    assert "None of 2 rows became worse or better" in capsys.readouterr().out
    assert command("show", str(again), "--html", str(tmp_path / "page.html"), "--junit", str(tmp_path / "j.xml")) == 0


def test_a_head_size_that_vllm_refuses_is_said(tmp_path: Path) -> None:
    model, out = save_checkpoint(tmp_path / "m", seed=1, head_dim=24), tmp_path / "cert.json"
    assert command(str(model), "--out", str(out), "--rows", "prefill", "--rollouts", "8", "--tokens", "16") == 1, (
        "nothing was tried"
    )
    (row,) = read_certificate(out).rows
    assert row.verdict == "not tried"
    assert "24" in row.sentence
