"""What the benchmark of certificates makes: the registry, and releases with a planted change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.certify import __main__ as bench
from benchmarks.certify import releases
from benchmarks.certify.fill import wanted
from benchmarks.certify.models import KINDS
from foreshock.certify.certificate import Certificate
from foreshock.scorers import ENGINE_DECODE
from tests.foreshock.certify.making import certificate, row
from tests.foreshock.certify.test_registry import ENGINE


def test_wanted_certificates_are_more_than_the_bar_and_of_known_models() -> None:
    found = list(wanted())
    assert len(found) == len(set(found)) >= 60
    assert {name.partition("-")[0] for _, _, name in found} <= set(KINDS)


@pytest.mark.parametrize("change", list(releases.CHANGES.values()), ids=list(releases.CHANGES))
def test_change_is_planted_from_the_third_release_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: releases.Change
) -> None:
    monkeypatch.setattr(releases, "ENVIRONMENTS", tmp_path / "plain")
    monkeypatch.setattr(releases, "make_environment", lambda package, release, folder: None)
    file = Path("lib", "python3.11", "site-packages", change.file)
    for release in releases.RELEASES:
        plain = tmp_path / "plain" / release / file
        plain.parent.mkdir(parents=True)
        plain.write_text(f"call({change.plain})")
        releases.set_up(change, release, tmp_path / release)
        is_changed = releases.RELEASES.index(release) >= 2
        assert (change.planted in (tmp_path / release / file).read_text()) == is_changed
        assert change.planted not in plain.read_text()


@pytest.mark.parametrize(("noises", "share"), [((0.01, 0.011), 1.0), ((0.01, 0.1), 0.0)])
def test_certificate_is_compared_with_those_of_other_models(
    noises: Sequence[float], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(noise: float, digest: str) -> Certificate:
        known = {ENGINE_DECODE: ENGINE.to_dict()}
        return certificate(row("prefill", noise), model_digest=digest, fingerprints=known)

    # Twice the same model is no other model.
    found = [made(noises[0], "sha256:a"), made(noises[0], "sha256:a"), made(noises[1], "sha256:b")]
    monkeypatch.setattr(bench, "entries", lambda: found)
    lines = {line.key: line.value for line in bench.registry()}
    assert (lines["left_out"], lines["within"]) == (3, share)
