"""Tests of the warning about variables that no part reads: client, service and worker know each other's names."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foreshock import Client
from foreshock.client.settings import FROM_ENVIRONMENT
from foreshock.setting_names import setting_names, unknown_settings
from foreshock_probes.settings import WorkerSettings
from foreshock_service.platform.settings import Settings
from tests.paths import PYTHONPATH, REPOSITORY
from tests.ports import free_port

MISSPELLED = "unknown setting FORESHOCK_MAX_TOKNES; did you mean FORESHOCK_MAX_TOKENS?"


def test_names_are_those_of_all_settings_objects() -> None:
    fields = {*Settings.model_fields, *WorkerSettings.model_fields, *FROM_ENVIRONMENT}
    assert {name.upper() for name in fields} <= setting_names()


def test_every_variable_that_the_sources_name_is_known() -> None:
    sources = [path for part in ("foreshock", "service", "probes") for path in (REPOSITORY / part).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r'"FORESHOCK_([A-Z_]+)"', path.read_text())}
    for path in (REPOSITORY / "docker-compose.yml", REPOSITORY / ".env.example", *REPOSITORY.glob("examples/**/*.sh")):
        named |= set(re.findall(r"\bFORESHOCK_([A-Z_]+)\b", path.read_text()))
    assert named <= setting_names()


def test_misspelled_name_is_reported_with_the_nearest_known_one() -> None:
    assert unknown_settings({"FORESHOCK_MAX_TOKNES": "secret"}) == {"FORESHOCK_MAX_TOKNES": MISSPELLED}
    (line,) = unknown_settings({"FORESHOCK_QQQQ": "secret"}).values()
    assert line == "unknown setting FORESHOCK_QQQQ: it has no effect; check its name, or unset it"


@pytest.mark.parametrize(
    "variable",
    [
        "FORESHOCK_SPOOL_DIRECTORY", "FORESHOCK_MODE", "FORESHOCK_DATABASE_URL", "foreshock_max_tokens",
        "FORESHOCK_WEIGHTS_ROOTS", "FORESHOCK_INSTRUCTION_SET", "FORESHOCK_BIND", "PATH",
        "FORESHOCK_SERVICE_HOST", "FORESHOCK_SERVICE_PORT_HTTP", "FORESHOCK_PORT_8765_TCP_ADDR",
    ],
)  # fmt: skip
def test_known_name_of_any_part_is_not_reported(variable: str) -> None:
    assert unknown_settings({variable: "x"}) == {}


def test_client_logs_a_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORESHOCK_SPOL_DIRECTORY", "x")
    monkeypatch.setattr("foreshock.setting_names._told", set())
    with caplog.at_level(logging.WARNING, "foreshock"):
        for _ in range(2):
            Client(f"http://127.0.0.1:{free_port()}", spool_directory=tmp_path).close()
    lines = [record.message for record in caplog.records if "unknown setting" in record.message]
    assert lines == ["unknown setting FORESHOCK_SPOL_DIRECTORY; did you mean FORESHOCK_SPOOL_DIRECTORY?"]


# Each ends at once with an error of its own.
@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ("serve", {"FORESHOCK_PROCESSES": "2"}),
        ("worker", {"FORESHOCK_LEASE_WAIT_SECONDS": "-1"}),
        ("runs", {"FORESHOCK_URL": "none"}),
    ],
)
def test_command_warns_at_its_start(command: str, variables: dict[str, str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    done = subprocess.run(
        [sys.executable, "-m", "foreshock.commands.main", command],
        env={**environment, **variables, "PYTHONPATH": PYTHONPATH, "FORESHOCK_MAX_TOKNES": "5"},
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert done.stderr.splitlines()[0] == f"foreshock: warning: {MISSPELLED}"
    assert "unknown setting" not in done.stderr.partition("\n")[2]
