"""The file of rules of a service: read at the start, the same for all runs, and derived again after a restart."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.rule_files import InvalidRules, parse_rules
from foreshock.learning_rate.length_decay import halvings_of
from foreshock_service.app import create_app
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.runs import RunUpdate, update_run
from foreshock_service.serving import serve
from foreshock_service.watch.detection.derivation import mark_outdated
from foreshock_service.watch.rules import SESSION_KEY
from tests.service.server import RunningServer
from tests.service.watch.recorded import K3, LENGTH, SURGE, SURGE_STEPS, RecordedRun

STRICT = "[rules.mismatch_warning]\nabsolute = 5e-5\n"
QUIET = "[rules.mismatch_runaway]\nenabled = false\n"
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
Start = Callable[[RecordedRun, str], None]


@pytest.fixture
def restart(database_url: str) -> Iterator[Start]:
    """Go on with a run in a service with another file of rules, as after a restart."""
    opened = []

    def start(run: RecordedRun, text: str) -> None:
        run.database = Database(database_url, session_info={SESSION_KEY: parse_rules(text)})
        opened.append(run.database)
        run.start()
        mark_outdated(run.database)

    yield start
    for database in opened:
        database.close()


def fired(run: RecordedRun, rule: str) -> list[tuple[int, str]]:
    return [(alert.step, alert.state) for alert in run.alerts() if alert.rule == rule]


def test_rules_in_force_are_shown_with_their_sources(settings: Settings, decoders: DecoderPool, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text("[rules.gradient_rise]\nrelative = 5.0\n[rules.entropy_fall]\nenabled = false\n")
    app = create_app(settings.model_copy(update={"rules": str(file)}), decoders)
    with RunningServer(app) as server, httpx.Client(base_url=server.url) as http:
        shown = http.get("/v1/rules", params={"model_kind": "moe"}).raise_for_status().json()
        assert http.get("/v1/rules", params={"model_kind": "huge"}).status_code == 422
    rules = {rule["name"]: rule for rule in shown["rules"]}
    assert list(rules) == [rule.name for rule in default_rules("moe") if rule.name != "entropy_fall"]
    assert rules["gradient_rise"]["relative"] == 5.0
    assert all(rule["source"] for rule in rules.values())


def test_another_file_judges_every_step_again(recorded: RecordedRun, restart: Start) -> None:
    recorded.close_all({K3: [5e-4] * 40}, range(1, 41))
    assert recorded.alerts() == []
    restart(recorded, STRICT)
    # Ten times the threshold: five steps.
    assert fired(recorded, "mismatch_warning") == [(5, "open")]
    recorded.close(41, {K3: 5e-4})
    assert mark_outdated(recorded.database) == 0
    restart(recorded, "")
    assert fired(recorded, "mismatch_warning") == [(5, "retracted")]


def test_ended_run_keeps_what_was_found_with_the_earlier_file(recorded: RecordedRun, restart: Start) -> None:
    recorded.close_all({K3: [5e-4] * 10}, range(1, 11))
    changes = RunUpdate(state="finished")
    recorded.database.write(lambda session: update_run(session, recorded.events, UNRESTRICTED, recorded.run, changes))
    restart(recorded, STRICT)
    assert recorded.alerts() == []


def test_another_file_never_raises_the_learning_rate(recorded: RecordedRun, restart: Start) -> None:
    recorded.close_all({K3: [5e-4] * 12 + [0.3] * 10}, range(1, 23))
    lowered = recorded.advice().scale(60)
    assert lowered < 0.5
    scales = []
    for text in (QUIET, "", QUIET, "[rules.mismatch_runaway]\nrelative = 2.0\n"):
        restart(recorded, text)
        scales.append(recorded.advice().scale(60))
    assert all(later <= earlier for earlier, later in pairwise([lowered, *scales]))
    assert fired(recorded, "mismatch_runaway")[0][1] == "open"


def test_rule_that_holds_freezes_the_learning_rate_while_it_fires(recorded: RecordedRun, restart: Start) -> None:
    restart(recorded, "[rules.mismatch_runaway]\neffect = 'hold'\n[loop]\nenabled = false\n")
    recorded.close_all({K3: [5e-4] * 12 + [0.3] * 10}, range(1, 23))
    assert recorded.decisions() == ["hold"]
    assert recorded.advice().held_from_step == 18
    recorded.close_all({K3: [5e-4] * 5}, range(23, 28))
    assert recorded.decisions() == ["hold", "release"]
    assert recorded.advice().scale(100) == 1.0


def test_schedule_of_the_file_is_kept_by_a_surge_that_has_begun(recorded: RecordedRun, restart: Start) -> None:
    restart(recorded, "[schedule]\nmultiplier = 2.0\nfactor = 0.8\nfloor = 0.4\n")
    recorded.close_all({LENGTH: SURGE}, SURGE_STEPS)
    steps = (119, 221, 222, 444, 2000)
    assert [recorded.advice().scale(step) for step in steps] == pytest.approx([1.0, 1.0, 0.8, 0.64, 0.4])
    # Another file keeps the schedule that has begun; without the surge the past halvings stay as deep.
    restart(recorded, "[schedule]\nfloor = 0.9\n")
    recorded.close_all({LENGTH: [SURGE[0]]}, [260])
    assert recorded.advice().scale(500) == pytest.approx(0.64)
    recorded.close_all({LENGTH: [SURGE[0]] * 40}, range(106, 146))
    retracted = recorded.advice()
    assert (retracted.schedule, halvings_of(retracted.points), retracted.factor) == (None, (222,), 0.8)
    assert retracted.scale(500) == 0.8


FAULTS = {
    "[[": "line 1: not valid TOML",
    "[rules.mismatch_ris]\nrelative = 3.0\n": "line 1: mismatch_ris is no known rule, did you mean 'mismatch_rise'?",
    "[rules.mismatch_rise]\nrelativ = 3.0\n": "line 2: rule mismatch_rise has the unknown field 'relativ'",
    "[rules.mismatch_rise]\nrelative = '3'\n": "line 2: relative of rule mismatch_rise must be a finite number",
    "[rules.mismatch_rise]\nminimum_duration = -1\n": "line 2: minimum_duration of rule mismatch_rise must be a whole",
}


def test_file_that_is_wrong_stops_the_start(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "rules.toml", tmp_path / "service"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FORESHOCK_RULES", str(file))
    with pytest.raises(InvalidRules, match=f"cannot read the file of rules {file}: No such file or directory"):
        serve()
    for text, message in FAULTS.items():
        file.write_text(text)
        with pytest.raises(InvalidRules, match=re.escape(f"{file}, {message}")):
            serve()
    assert list(folder.iterdir()) == [], "nothing was made"
