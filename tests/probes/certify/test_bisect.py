"""`foreshock certify bisect`: which release is found, and what becomes of one that cannot be tried.

The environment of a release is a program that gives a certificate made before; with real releases of an engine it is
measured by `make bench-certify`.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

import pytest

from foreshock.certify.certificate import write_certificate
from foreshock.errors import ConfigurationError
from foreshock_probes.certify.command import certify
from tests.foreshock.certify.making import certificate, row

RELEASES = ("0.1", "0.2", "0.9", "0.10", "0.11")
SETUP = """
test -f {given}/$RELEASE.json || {{ echo no wheel for this machine; exit 3; }}
mkdir -p $FOLDER/bin && cat > $FOLDER/bin/python <<END
#!/bin/sh
while [ "\\$1" != --out ]; do shift; done
echo $RELEASE >> {given}/asked
cp {given}/$RELEASE.json "\\$2"
END
chmod +x $FOLDER/bin/python
"""


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the releases' certificates; pip finds wheels of all releases."""
    folder = tmp_path / "given"
    folder.mkdir()
    for release in RELEASES:
        with zipfile.ZipFile(folder / f"planted-{release}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"planted-{release}.dist-info/METADATA", f"Name: planted\nVersion: {release}\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def bisected(given: Path, noises: dict[str, float], *words: str) -> int:
    """Bisect over releases whose engine has this noise; those without one have no environment."""
    for seed, (release, noise) in enumerate(noises.items()):
        write_certificate(given / f"{release}.json", certificate(row("prefill", noise, seed=seed + 1)))
    parser = argparse.ArgumentParser()
    certify.configure(parser)
    words = (
        *("bisect", "model", "--package", "planted", "--from", "0.1", "--to", "0.11"),
        *("--setup", SETUP.format(given=given), *words),
    )
    return certify.run(parser.parse_args(words))


def test_release_runs_with_its_own_packages_inside_a_checkout(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interpreter is a real one: `foreshock` of the current folder would be imported without -P."""
    checkout = tmp_path / "foreshock" / "commands"
    checkout.mkdir(parents=True)
    for file in (checkout.parent / "__init__.py", checkout / "__init__.py"):
        file.touch()
    (checkout / "main.py").write_text("raise RuntimeError('of the checkout')")
    own = tmp_path / "own" / "foreshock" / "commands"
    own.mkdir(parents=True)
    (own / "main.py").write_text("raise RuntimeError('of the environment')")
    setup = f"""
mkdir -p $FOLDER/bin && cat > $FOLDER/bin/python <<END
#!/bin/sh
PYTHONPATH={tmp_path}/own exec {sys.executable} -S "\\$@"
END
chmod +x $FOLDER/bin/python
"""
    with pytest.raises(ConfigurationError, match="made no certificate: RuntimeError: of the environment"):
        bisected(given, {}, "--setup", setup)


@pytest.mark.parametrize("changed", RELEASES[1:])
def test_first_release_that_changed_is_found(given: Path, changed: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = RELEASES.index(changed)
    noises = {release: 0.01 if place < first else 0.5 for place, release in enumerate(RELEASES)}
    assert bisected(given, noises) == 1
    out = capsys.readouterr().out
    assert f"planted {changed} is the first release that changed a row; {RELEASES[first - 1]} did not." in out
    assert "worse: prefill: " in out
    assert len((given / "asked").read_text().split()) <= 4


def test_releases_that_change_nothing_are_two_certificates(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bisected(given, dict.fromkeys(RELEASES, 0.01)) == 0
    assert "No row differs between 0.1 and 0.11." in capsys.readouterr().out
    assert (given / "asked").read_text().split() == ["0.1", "0.11"]


def test_release_that_cannot_be_tried_is_skipped_and_named(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bisected(given, {"0.2": 0.01, "0.10": 0.5, "0.11": 0.5}) == 1
    out = capsys.readouterr().out
    assert "A row changed after planted 0.2 and by 0.10; 0.9 could not be tried." in out
    assert "0.1 was skipped: sh -c" in out
    assert "ended with 3: no wheel for this machine" in out


def test_environments_of_a_first_call_are_taken_up(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert bisected(given, dict.fromkeys(RELEASES, 0.01)) == 0
    assert capsys.readouterr().err.count("makes its environment") == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--from", "7"), "--from: pip finds no release 7 of planted; the newest are 0.1, 0.2, 0.9, 0.10, 0.11"),
        (("--from", "0.10", "--to", "0.2"), "--from 0.10 must be an older release than --to 0.2"),
        (("--package", "unknown-here"), "pip finds no releases of unknown-here"),
        (("--out", "x.json"), "--out is not for bisect"),
        (("--from", "0.2", "--to", "0.9"), "fewer than two releases of planted certify; 0.2 was skipped"),
    ],
)
def test_what_cannot_be_bisected_is_refused(given: Path, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told.replace(".", r"\.")):
        bisected(given, {}, *words)


def test_options_of_bisect_are_refused_without_it(given: Path) -> None:
    parser = argparse.ArgumentParser()
    certify.configure(parser)
    with pytest.raises(ConfigurationError, match="belong to `bisect MODEL`"):
        certify.run(parser.parse_args(["model", "--package", "planted"]))
    with pytest.raises(ConfigurationError, match="bisect needs --package, --from and --to"):
        certify.run(parser.parse_args(["bisect", "model", "--package", "planted"]))
