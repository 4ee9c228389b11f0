"""Every line of the threat model names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.paths import DOCS, REPOSITORY

PAGE = DOCS / "threat-model.md"
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and not line.startswith(("| ---", "| tries", "| what fails"))
]


def test_the_page_has_threats_of_every_actor() -> None:
    assert len(ROWS) >= 30
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    for actor in ("Anyone", "A thief", "A trainer", "A worker", "A service", "Another user", "A visitor"):
        assert any(heading.startswith(actor) for heading in headings), actor


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_threat_names_an_existing_test(row: list[str]) -> None:
    assert len(row) == 3, row
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2])
    assert tests, f"no test for: {row[0]}"
    for path, name in tests:
        code = (REPOSITORY / path).read_text()
        assert re.search(rf"^\s*(async )?def {name}\(", code, re.MULTILINE), f"{path}::{name}"
