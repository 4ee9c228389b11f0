"""Every line of the threat model names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.paths import DOCS, REPOSITORY

PAGE = DOCS / "threat-model.md"
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and not line.startswith(("| ---", "| who"))
]


def test_the_page_has_threats_of_every_actor() -> None:
    assert len(ROWS) >= 30
    actors = {row[0] for row in ROWS}
    assert {"anyone on the network", "trainer", "worker", "service", "page visitor"} <= actors


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:60])
def test_threat_names_an_existing_test(row: list[str]) -> None:
    assert len(row) == 4, row
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[3])
    assert tests, f"no test for: {row[1]}"
    for path, name in tests:
        code = (REPOSITORY / path).read_text()
        assert re.search(rf"^\s*(async )?def {name}\(", code, re.MULTILINE), f"{path}::{name}"
