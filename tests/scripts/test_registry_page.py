"""The table of docs/registry.md is written from the certificates of the registry."""

from dataclasses import replace

from foreshock.certify.registry import entries
from scripts.registry_page import DOCUMENT, current_text, registry_table


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text() == current_text(), "run python -m scripts.registry_page"


def test_every_model_and_dtype_is_a_line_and_releases_are_counted() -> None:
    lines = [line.split() for line in registry_table(entries()).splitlines() if line.startswith("  ")]
    lines = [line for line in lines if line[0] != "model"]
    assert sum(int(line[-1].partition("/")[2]) for line in lines) == len(entries())
    assert {line[0] for line in lines} == {each.model for each in entries()}


def test_release_with_another_number_is_not_counted_as_equal() -> None:
    one = entries()[0]
    row = replace(one.rows[0], sizes=(replace(one.rows[0].sizes[0], k3=1.0), *one.rows[0].sizes[1:]))
    older = {name: {**each, "engine_version": "0.1.0"} for name, each in one.fingerprints.items()}
    other = replace(one, rows=(row, *one.rows[1:]), fingerprints=older)
    (same,) = registry_table([one, one]).splitlines()[-2:-1]
    (differs,) = registry_table([one, other]).splitlines()[-2:-1]
    assert same.split()[-1] == "2/2"
    assert differs.split()[-1] == "1/2"
    (most,) = registry_table([one, other, one]).splitlines()[-2:-1]
    assert most.split()[-1] == "2/3"
