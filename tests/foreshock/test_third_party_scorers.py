"""Entry points add scorers; broken ones and names in use are refused with a reason and never raise."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from foreshock.scorers import ENGINES, SCORERS, Scorer
from foreshock.third_party_scorers import ENTRY_POINT_GROUP, Found, rows_of

MODULE = """
from foreshock.scorers import Scorer
def row(name, engine="torch", implementation="other_scorers:score"):
    return Scorer(name=name, title="", colour=1, engine=engine, implementation=implementation)
GOOD = row("torch.float64")
CLASH = row("torch.float32")
ENGINE = row("acme.prefill", engine="acme")
LOGGED = row("torch.logged", implementation=None)
TEXT = "torch.text"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_scorers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def found(*entries: tuple[str, str]) -> Found[Scorer]:
    points = [EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in entries]
    return rows_of(points, Scorer, set(SCORERS), set(ENGINES))


@pytest.mark.usefixtures("module")
def test_row_of_an_entry_point_is_found() -> None:
    one = found(("torch.float64", "other_scorers:GOOD"))
    assert one.refused == ()
    assert one.rows["torch.float64"].implementation == "other_scorers:score"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("torch.float32", "other_scorers:CLASH", "Foreshock has a scorer of that name"),
        ("torch.other", "other_scorers:GOOD", "its row has the name 'torch.float64'"),
        ("acme.prefill", "other_scorers:ENGINE", "its engine must be one of http, torch, vllm, got 'acme'"),
        ("torch.logged", "other_scorers:LOGGED", "'module:function', got None"),
        ("torch.text", "other_scorers:TEXT", "must be a foreshock.scorers.Scorer, got str"),
        ("torch.none", "other_scorers:MISSING", "cannot be imported: AttributeError"),
        ("torch.none", "no_such_module:ROW", "cannot be imported: ModuleNotFoundError"),
        ("float64", "other_scorers:GOOD", "two words with a dot"),
    ],
)
def test_wrong_entry_is_refused_with_its_reason(name: str, value: str, reason: str) -> None:
    one = found((name, value))
    assert one.rows == {}
    assert len(one.refused) == 1
    assert name in one.refused[0]
    assert reason in one.refused[0]


@pytest.mark.usefixtures("module")
def test_of_two_packages_with_one_name_neither_is_taken() -> None:
    both = found(("torch.float64", "other_scorers:GOOD"), ("torch.float64", "other_scorers:CLASH"))
    assert both.rows == {}
    assert "several packages" in both.refused[0]
