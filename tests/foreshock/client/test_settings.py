"""Tests of the client's settings and their sources."""

import inspect
import os
import re
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest

from foreshock.client import Client
from foreshock.client.settings import ClientSettings
from foreshock.errors import ConfigurationError
from tests.paths import DOCS
from tests.ports import free_port


def test_arguments_override_environment_and_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("URL", "API_KEY", "SPOOL_DIRECTORY"):
        monkeypatch.delenv(f"FORESHOCK_{name}", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ClientSettings.resolve().url == "http://127.0.0.1:8765"
    assert ClientSettings.resolve().spool_directory.parent == tmp_path / "foreshock" / "spool"
    assert ClientSettings.resolve("http://a").spool_directory != ClientSettings.resolve("http://b").spool_directory
    monkeypatch.setenv("FORESHOCK_URL", "http://e")
    monkeypatch.setenv("FORESHOCK_API_KEY", "fsk_e")
    monkeypatch.setenv("FORESHOCK_SPOOL_DIRECTORY", "/somewhere")
    settings = ClientSettings.resolve()
    assert (settings.url, settings.api_key, settings.spool_directory) == ("http://e", "fsk_e", Path("/somewhere"))
    assert ClientSettings.resolve("http://f", "fsk_f", tmp_path) == ClientSettings("http://f", "fsk_f", tmp_path)


def test_what_travels_may_be_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClientSettings.resolve().mode == "tokens"
    monkeypatch.setenv("FORESHOCK_MODE", "statistics")
    monkeypatch.setenv("FORESHOCK_FULL_ROLLOUTS", "16")
    settings = ClientSettings.resolve(worst_rollouts=2)
    assert (settings.mode, settings.full_rollouts, settings.worst_rollouts) == ("statistics", 16, 2)
    assert ClientSettings.resolve(mode="tokens").mode == "tokens"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mode", "sums", "mode must be one of tokens, statistics, got 'sums'"),
        ("full_rollouts", "many", "full_rollouts must be a whole number >= 1, got 'many'"),
        ("full_rollouts", "0", "full_rollouts must be a whole number >= 1, got '0'"),
        ("worst_rollouts", "-1", "worst_rollouts must be a whole number >= 0, got '-1'"),
    ],
)
def test_invalid_settings_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        ClientSettings.resolve(**{name: value})
    monkeypatch.setenv(f"FORESHOCK_{name.upper()}", value)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        ClientSettings.resolve()


def test_page_lists_every_setting() -> None:
    page = (DOCS / "connect-a-trainer.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (?:`FORESHOCK_\w+` )?\| ", page, re.MULTILINE)
    assert {item.name for item in fields(ClientSettings)} <= set(rows)
    assert set(rows) <= set(inspect.signature(Client).parameters) | {item.name for item in fields(ClientSettings)}


def test_planted_temporary_folder_is_not_used_where_the_home_folder_is_not_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FORESHOCK_SPOOL_DIRECTORY", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    predictable = tmp_path / f"foreshock-{os.geteuid()}"

    def folder() -> Path:
        return ClientSettings.resolve().spool_directory.parents[2]

    assert folder() == predictable
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    predictable.symlink_to(elsewhere)
    assert folder() != predictable
    predictable.unlink()
    predictable.mkdir()
    predictable.chmod(0o777)
    unpredictable = folder()
    assert re.fullmatch(rf"foreshock-{os.geteuid()}-[0-9a-f]{{32}}", unpredictable.name)
    assert folder() != unpredictable, "a new name while no folder has one"
    unpredictable.mkdir(mode=0o700)
    assert folder() == unpredictable, "what an earlier process kept there is found"


def test_user_without_a_home_folder_has_a_spool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    # As for the user of a container that has no line in /etc/passwd.
    monkeypatch.setattr(Path, "home", no_home)
    for name in ("FORESHOCK_SPOOL_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert tmp_path in ClientSettings.resolve().spool_directory.parents


def test_spool_in_an_unknown_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESHOCK_SPOOL_DIRECTORY", raising=False)
    with pytest.raises(ConfigurationError, match="give an absolute path"):
        ClientSettings.resolve(spool_directory="~no-such-user-of-this-machine/spool")


def test_items_that_no_spool_took_are_not_said_to_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # No folder can be made below a file, by any user.
    (tmp_path / "file").touch()
    spool = tmp_path / "file" / "spool"
    client = Client(f"http://127.0.0.1:{free_port()}", spool_directory=spool, exit_seconds=0.2)
    client.start_run(model="m", initial_learning_rate=1e-6)
    client.close()
    printed = capsys.readouterr().err
    assert f"1 could not be written to {spool} and end with this process" in printed
    assert "are kept in" not in printed
