"""The table of releases, against the releases' own sources (`scripts/release_sources.py`)."""

import ast
import os
import sys
from pathlib import Path

import pytest

from foreshock.client.reporting import LogOnce
from foreshock.integrations import releases
from foreshock.integrations.releases import KNOWN_VERSIONS, is_known, warn_of_unknown_version
from foreshock.integrations.slime_framework import FRAMEWORKS, Framework
from scripts.releases import INDEXED, RELEASES, Releases

SOURCES = Path(os.environ.get("FORESHOCK_RELEASE_SOURCES") or Path(sys.prefix) / "releases")
CASES = [(name, version) for name in INDEXED for row in RELEASES[name] if row.places for version in row.versions]


def source_of(framework: str, version: str, name: str) -> ast.Module:
    path = SOURCES / f"{framework}-{version}" / name
    if not path.exists() and not os.environ.get("CI"):
        pytest.skip(f"no {path}; run python -m scripts.release_sources {SOURCES}")
    return ast.parse(path.read_text())


def names_in(module: ast.Module) -> set[str]:
    """Return what a file defines ("f", "Class.f", "Class.field"), calls ("f()"), and reads of self ("self.x")."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in module.body if isinstance(node, functions)}
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, functions)}
            found |= {
                f"{node.name}.{ast.unparse(each.target)}" for each in node.body if isinstance(each, ast.AnnAssign)
            }
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(f"{node.func.id}()")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(f"self.{node.attr}")
    return found


@pytest.mark.parametrize(("framework", "version"), CASES)
def test_each_release_has_what_is_observed(framework: str, version: str) -> None:
    assert is_known(framework, version)
    row = next(row for row in RELEASES[framework] if version in row.versions)
    for name, places in row.places.items():
        assert set(places) <= names_in(source_of(framework, version, name)), name


@pytest.mark.parametrize(
    ("framework", "row"), [(each, row) for each in FRAMEWORKS for row in RELEASES[each.name] if row.places]
)
def test_the_slime_family_finds_a_place_for_each_hook(framework: Framework, row: Releases) -> None:
    for places in (framework.rollout_data, framework.end, framework.metrics, framework.forward, framework.save):
        files = [(f"{framework.name}/{module.replace('.', '/')}", function) for module, function in places]
        assert any(
            {function, f"{function}()"} & set(row.places.get(f"{path}{end}", ()))
            for path, function in files
            for end in (".py", "/__init__.py")
        ), places


@pytest.mark.parametrize("version", [version for name, version in CASES if name == "trl"])
def test_trl_returns_one_column_of_log_probs_and_one_mask(version: str) -> None:
    """The hook recognises them by their values."""
    module = source_of("trl", version, "trl/trainer/grpo_trainer.py")
    (generate,) = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "_generate"]
    returned = [node.value.elts for node in ast.walk(generate)
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)]  # fmt: skip
    for names in returned:
        assert [ast.unparse(each) for each in names[:2]] == ["prompt_ids", "completion_ids"]
        assert {"tool_mask", "logprobs"} <= {ast.unparse(each) for each in names[2:]}


def test_an_unknown_release_gets_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert not is_known("trl", "1.99.0")
    assert not is_known("trl", "0.29.1")
    assert is_known("trl", "1.16.3")
    monkeypatch.setattr(releases, "installed", lambda _: "1.99.0")
    log = LogOnce("foreshock.tests")
    for _ in range(2):
        warn_of_unknown_version("trl", log)
    (record,) = caplog.records
    assert "trl 1.99.0 is not known" in record.message
    assert record.message.endswith(f"Known versions: {KNOWN_VERSIONS['trl']}.")


def test_a_known_release_logs_no_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(releases, "installed", lambda _: "0.9.1")
    warn_of_unknown_version("verl", LogOnce("foreshock.tests"))
    assert not caplog.records


def test_known_versions_are_those_of_the_table() -> None:
    for framework, rows in RELEASES.items():
        versions = (version.split(".")[:2] for row in rows for version in row.versions)
        assert KNOWN_VERSIONS[framework].split(", ") == list(dict.fromkeys(".".join(minor) for minor in versions))
    assert KNOWN_VERSIONS.keys() == RELEASES.keys()
