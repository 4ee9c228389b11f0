"""Calls of an operator need the scopes that docs/api.md names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest

from foreshock import Operator
from foreshock.errors import ServiceError, Unauthorized
from tests.foreshock.running_service import RunningService
from tests.foreshock.twins import described_methods
from tests.paths import DOCS

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "acknowledge_alert": ("alert",),
    "announce_change": (1, "other"),
    "announce_checkpoint": (1,),
    "decide": ("hold", "why"),
    "examine_step": (1,),
    "request_probe": (1,),
    "resolve_alert": ("alert",),
    "set_rules": ("version = 1\neffective_from_step = 1\n",),
}
NAMED: dict[str, dict[str, Any]] = {
    "announce_checkpoint": {"root": "weights", "path": "step-1", "digest": "sha256:" + "0" * 64},
    "request_probe": {"scorers": ["vllm.prefill"]},
    "set_retention": {"last_steps": 5},
}


def scopes_of_page() -> dict[str, str]:
    rows = re.findall(r"^\| [^|]* \| ([^|]*) \| [^|]* \| (ingest|admin) \|$", (DOCS / "api.md").read_text(), re.M)
    return {name: scope for methods, scope in rows for name in re.findall(r"`(\w+)`", methods)}


def make_key(service: RunningService, scope: str) -> str:
    """Return a new key of the service, with one scope."""
    environment = os.environ | {"FORESHOCK_DATABASE_URL": f"sqlite:///{service.folder / 'data' / 'foreshock.db'}"}
    command = [sys.executable, "-m", "foreshock.commands.main", "keys", "create", scope, "--scope", scope]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (key,) = re.findall(r"\bfsk_[\w-]+", made.stdout)
    return str(key)


@pytest.fixture(scope="module")
def keys(real_service: RunningService) -> dict[str, str]:
    """A key of each scope."""
    return {scope: make_key(real_service, scope) for scope in ("read", "ingest", "admin")}


@pytest.fixture(scope="module")
def run(real_service: RunningService, keys: dict[str, str]) -> str:
    """A run of the service."""
    headers = {"Authorization": f"Bearer {keys['admin']}"}
    answer = httpx.post(f"{real_service.url}/v1/runs", json={"key": "a-run"}, headers=headers, timeout=60)
    run: str = answer.raise_for_status().json()["id"]
    return run


def refusal_of(operator: Operator, name: str, run: str) -> ServiceError | None:
    """Call a method, and return the error that it raises."""
    subject = "a-probe" if name in ("retry_probe", "cancel_probe") else run
    try:
        getattr(operator, name)(subject, *ARGUMENTS.get(name, ()), **NAMED.get(name, {}))
    except ServiceError as error:
        return error
    return None


@pytest.mark.parametrize("scope", ["read", "ingest", "admin"])
def test_calls_need_the_scopes_of_the_page(keys: dict[str, str], run: str, real_service: Any, scope: str) -> None:
    allowed = {"read": set(), "ingest": {"ingest"}, "admin": {"ingest", "admin"}}[scope]
    needed = scopes_of_page()
    assert needed.keys() == set(described_methods(Operator))
    with Operator(real_service.url, api_key=keys[scope]) as operator:
        # The run is deleted last.
        for name in sorted(needed, key=lambda name: name == "delete_run"):
            refusal = refusal_of(operator, name, run)
            assert isinstance(refusal, Unauthorized) == (needed[name] not in allowed), (name, refusal)
            if isinstance(refusal, Unauthorized):
                assert refusal.status == 403
                assert refusal.problem["type"].endswith("scope-missing")
                assert refusal.problem["request_id"]


def test_without_a_key_nothing_is_changed(keys: dict[str, str], run: str, real_service: RunningService) -> None:
    with Operator(real_service.url) as operator, pytest.raises(Unauthorized, match="FORESHOCK_API_KEY") as raised:
        operator.decide(run, "hold", "why")
    assert raised.value.status == 401
