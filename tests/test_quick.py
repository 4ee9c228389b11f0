"""The split between `make test` and `make test-all` names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.paths import REPOSITORY
from tests.quick import FULL, POSTGRES, QUICK_AFTER_ALL, is_quick

FILES = [path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "tests").rglob("test_*.py")]


@pytest.mark.parametrize("pattern", [*FULL.pattern.split("|tests/"), *POSTGRES.pattern.split("|tests/")])
def test_each_pattern_matches_a_file(pattern: str) -> None:
    assert any(re.match(f"(tests/)?{pattern.removeprefix('tests/')}", path) for path in FILES)


@pytest.mark.parametrize("name", QUICK_AFTER_ALL)
def test_each_exception_is_a_test(name: str) -> None:
    path, _, function = name.partition("::")
    assert f"\ndef {function}(" in (REPOSITORY / path).read_text()
    assert is_quick(f"{name}[sqlite]", (), {"database_url": "sqlite"})


def test_postgresql_is_quick_where_it_decides() -> None:
    for path, expected in (
        ("tests/service/runs/ingest/test_ingest.py", True),
        ("tests/service/runs/test_lint.py", False),
    ):
        assert is_quick(f"{path}::test_x[postgresql]", (), {"database_url": "postgresql"}) is expected
        assert is_quick(f"{path}::test_x[sqlite]", (), {"database_url": "sqlite"})
