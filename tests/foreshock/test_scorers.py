"""The table of scorers: order of the chain, causes of links, noise floors, and the names in one place only."""

import ast
import itertools
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from foreshock import scorers
from tests.paths import REPOSITORY


def test_chain_goes_from_rollout_to_trainer() -> None:
    assert scorers.CHAIN == ("rollout", "vllm.decode", "vllm.prefill", "torch.trainer", "trainer")
    assert scorers.REFERENCE not in scorers.CHAIN


@pytest.mark.parametrize("scorer", scorers.SCORERS.values(), ids=scorers.SCORERS)
def test_name_engine_and_implementation_agree(scorer: scorers.Scorer) -> None:
    engine, dot, _ = scorer.name.partition(".")
    assert (scorer.engine is None) == (not dot)
    assert scorer.engine in (None, engine) or scorers.ENGINES[str(scorer.engine)].remote
    assert scorer.engine is None or scorer.engine in scorers.ENGINES
    assert scorer.implementation is None or scorer.engine is not None


def test_every_cause_has_a_short_name() -> None:
    assert scorers.PLACES[0].cause == ""
    assert all(0 < place.cause.find(": ") < 60 for place in scorers.PLACES[1:])


def test_missing_scores_name_all_causes_between() -> None:
    assert scorers.cause_of_link("torch.trainer", "trainer") == scorers.PLACES[-1].cause
    joined = scorers.cause_of_link("rollout", "vllm.prefill")
    assert joined.startswith("engine sampling against replay or decode against prefill: ")
    assert joined.endswith("; not told apart, because scores between these two are missing")
    for pair in (("rollout", "another.scorer"), ("trainer", "rollout"), ("rollout", scorers.REFERENCE)):
        assert scorers.cause_of_link(*pair) == f"any difference between {pair[0]} and {pair[1]}"


@pytest.mark.parametrize(("earlier", "later"), list(itertools.combinations(scorers.CHAIN, 2)))
def test_no_explanation_is_cut_off_whichever_scores_are_missing(earlier: str, later: str) -> None:
    places = [
        scorers.SCORERS[name].place
        for name in scorers.CHAIN[scorers.CHAIN.index(earlier) + 1 : scorers.CHAIN.index(later) + 1]
    ]
    cause = scorers.cause_of_link(earlier, later)
    for place in places:
        assert place is not None
        name, _, explanation = place.cause.partition(": ")
        assert name in cause.partition(":")[0]
        assert explanation in cause


REPLAYS_OF_ROLLOUT = ("vllm.decode", "vllm.prefill", "vllm.http", "sglang.http", "sglang.decode")


def test_logged_score_takes_the_noise_of_its_replays() -> None:
    assert scorers.noise_floor_scorers("rollout") == REPLAYS_OF_ROLLOUT
    assert scorers.noise_floor_scorers("trainer") == ("torch.trainer", "torch.own")
    assert scorers.noise_floor_scorers("torch.trainer") == ("torch.trainer",)
    assert scorers.noise_floor_scorers("another.scorer") == ("another.scorer",)


def test_default_probe_covers_the_available_chain_and_the_reference() -> None:
    assert scorers.default_scorers() == ("vllm.prefill", "torch.trainer", "torch.float32")
    assert set(scorers.default_scorers()) <= set(scorers.available_scorers())


def test_main_comparisons_are_the_whole_the_links_and_the_side_branch() -> None:
    assert scorers.main_comparisons() == (
        "trainer/rollout", "vllm.prefill/rollout", "torch.trainer/vllm.prefill", "trainer/torch.trainer",
        "torch.float32/vllm.prefill", "torch.float32/torch.trainer",
    )  # fmt: skip


def test_middle_of_chain_prefers_replays() -> None:
    assert scorers.middle_of_chain(scorers.CHAIN) == ("vllm.prefill", "torch.trainer")
    assert scorers.middle_of_chain(["rollout", "trainer"]) == ("rollout", "trainer")
    assert scorers.middle_of_chain(["rollout", "another.scorer"]) == ("rollout", None)


def test_score_name_splits_into_scorer_and_variant() -> None:
    for variant in scorers.VARIANTS:
        assert scorers.split_score_name(scorers.score_name("vllm.prefill", variant)) == ("vllm.prefill", variant)
    assert scorers.score_name("vllm.prefill", scorers.NOISE_FLOOR_VARIANT) == "vllm.prefill@rebatched"


def test_new_row_is_in_the_chain_the_default_probe_and_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    place = scorers.SCORERS["vllm.prefill"].place
    row = scorers.Scorer("other.prefill", "another engine", 2, place, "other", "foreshock_probes.scorers.other:score")
    monkeypatch.setitem(scorers.SCORERS, row.name, row)
    assert row.name in scorers.available_scorers()
    assert scorers.chain_of({"rollout", "other.prefill", "trainer"})[2] == "other.prefill"
    assert scorers.cause_of_link("other.prefill", "torch.trainer") == scorers.cause_of_link(
        "vllm.prefill", "torch.trainer"
    )
    assert scorers.noise_floor_scorers("rollout") == (*REPLAYS_OF_ROLLOUT, "other.prefill")
    # If both engines scored a step, the first row of the table is in the chain.
    assert scorers.chain_of({"vllm.prefill", "other.prefill"})[2] == "vllm.prefill"


def code_texts(path: Path) -> Iterator[str]:
    """Yield the string constants of a module except docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_names_of_replays_are_written_in_the_table_only() -> None:
    names = [name for name, scorer in scorers.SCORERS.items() if scorer.engine is not None]
    # A scorer's own file may name it in its errors.
    modules = {str(scorer.implementation).partition(":")[0] for scorer in scorers.SCORERS.values()}
    own = {
        module.replace(".", "/").replace("foreshock_probes/", "probes/foreshock_probes/") + ".py" for module in modules
    }
    found = [
        (str(path.relative_to(REPOSITORY)), text)
        for part in ("foreshock", "service", "probes", "dashboards", "examples", "benchmarks", "scripts")
        for path in (REPOSITORY / part).rglob("*.py")
        for text in code_texts(path)
        if any(name in text for name in names) or text == scorers.NOISE_FLOOR_VARIANT
    ]
    elsewhere = [(path, text) for path, text in found if path not in {"foreshock/scorers.py", *own}]
    assert not elsewhere, "read the name from foreshock.scorers"


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


def found(*entries: tuple[str, str]) -> tuple[dict[str, scorers.Scorer], tuple[str, ...]]:
    return scorers.scorers_of(EntryPoint(name, value, scorers.ENTRY_POINT_GROUP) for name, value in entries)


@pytest.mark.usefixtures("module")
def test_row_of_an_entry_point_is_found() -> None:
    rows, refused = found(("torch.float64", "other_scorers:GOOD"))
    assert refused == ()
    assert rows["torch.float64"].implementation == "other_scorers:score"


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
    rows, (refused,) = found((name, value))
    assert rows == {}
    assert name in refused
    assert reason in refused


@pytest.mark.usefixtures("module")
def test_of_two_packages_with_one_name_neither_is_taken() -> None:
    rows, refused = found(("torch.float64", "other_scorers:GOOD"), ("torch.float64", "other_scorers:CLASH"))
    assert rows == {}
    assert "several packages" in refused[0]
