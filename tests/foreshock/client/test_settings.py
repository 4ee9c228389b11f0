"""Tests of the client's settings and their sources."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from foreshock.client import Client
from foreshock.client.settings import ClientSettings
from tests.paths import DOCS


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


def test_page_lists_every_setting() -> None:
    page = (DOCS / "connect-a-trainer.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (?:`FORESHOCK_\w+` )?\| ", page, re.MULTILINE)
    assert {item.name for item in fields(ClientSettings)} <= set(rows)
    assert set(rows) <= set(inspect.signature(Client).parameters) | {item.name for item in fields(ClientSettings)}
