"""API keys: required once one was made, limited to their scopes and project."""

import time
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from foreshock.errors import ConfigurationError
from foreshock.rollouts import DecodeLimits
from foreshock_service.platform import security
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ApiKey
from foreshock_service.platform.decoding.worker import decode_limits
from foreshock_service.platform.security import Scope, hash_secret, new_secret, revoke_key
from foreshock_service.platform.settings import Settings, is_loopback, load_settings
from foreshock_service.serving import check_processes, prepare_keys
from tests.service.keys import make_key


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_requests_need_a_key_after_the_first_key(http: httpx.Client, database: Database) -> None:
    _, headers = make_key(database, Scope.READ)
    answers = [http.get("/v1/runs"), http.get("/v1/runs", headers=bearer(new_secret()))]
    for answer in answers:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"] == "application/problem+json"
    assert http.get("/v1/runs", headers=headers).status_code == 200


def test_scope_allows_only_its_own_routes(http: httpx.Client, database: Database) -> None:
    reader, writer, admin = (make_key(database, scope)[1] for scope in (Scope.READ, Scope.INGEST, Scope.ADMIN))
    assert http.post("/v1/runs", json={"key": "r"}, headers=reader).status_code == 403
    run = http.post("/v1/runs", json={"key": "r"}, headers=writer).json()["id"]
    assert http.get("/v1/runs", headers=writer).status_code == 403
    assert http.delete(f"/v1/runs/{run}", headers=writer).status_code == 403
    assert http.delete(f"/v1/runs/{run}", headers=admin).status_code == 204


def test_project_key_makes_no_run_of_another_project(http: httpx.Client, database: Database) -> None:
    _, theirs = make_key(database, Scope.INGEST, project="theirs")
    assert http.post("/v1/runs", json={"key": "r", "project": "ours"}, headers=theirs).status_code == 403


def test_revoked_key_is_refused_and_the_service_stays_protected(http: httpx.Client, database: Database) -> None:
    key_id, headers = make_key(database, Scope.ADMIN)
    assert database.write(lambda session: revoke_key(session, key_id))
    assert http.get("/v1/runs", headers=headers).status_code == 401
    assert http.get("/v1/runs").status_code == 401


def test_only_the_hash_of_a_key_is_stored(database: Database) -> None:
    secret = make_key(database, Scope.READ)[1]["Authorization"].removeprefix("Bearer ")
    with database.read() as session:
        stored = session.query(ApiKey).one()
    assert stored.secret_hash == hash_secret(secret)
    assert secret not in repr(vars(stored))


def test_session_is_valid_until_it_expires_and_only_as_signed() -> None:
    secret = b"s" * 32
    cookie, other = security.sign_session(secret, "key_1"), security.sign_session(secret, "key_2")
    signed = security.verify_session(secret, cookie, 60)
    assert signed is not None
    assert signed[0] == "key_1"
    assert security.sign_session(secret, "key_1") != cookie
    assert security.verify_session(b"t" * 32, cookie, 60) is None
    assert security.verify_session(secret, other.split(".")[0] + cookie[cookie.index(".") :], 60) is None
    assert security.verify_session(secret, cookie[:-1], 60) is None
    assert security.verify_session(secret, "", 60) is None
    time.sleep(1.1)
    assert security.verify_session(secret, cookie, 0) is None
    assert security.verify_session(secret, cookie, 60) == signed


def test_a_form_token_belongs_to_one_session() -> None:
    secret = b"s" * 32
    cookie, other = security.sign_session(secret, "key_1"), security.sign_session(secret, "key_2")
    assert security.is_form_token(secret, cookie, security.form_token(secret, cookie))
    assert not security.is_form_token(secret, other, security.form_token(secret, cookie))
    assert not security.is_form_token(b"t" * 32, cookie, security.form_token(secret, cookie))
    # The signature of a session is not accepted as a form token.
    assert not security.is_form_token(secret, cookie, cookie.rpartition(".")[2])
    assert not security.is_form_token(secret, cookie, "")
    assert not security.is_form_token(secret, cookie, "not ascii: μ")


def test_session_cookie_authenticates_its_key_on_the_services_own_pages(
    app: FastAPI, http: httpx.Client, database: Database
) -> None:
    key_id, _ = make_key(database, Scope.ADMIN)
    forged = {"Cookie": f"{security.SESSION_COOKIE}={security.sign_session(b'another', key_id)}"}
    signed = {"Cookie": f"{security.SESSION_COOKIE}={security.sign_session(app.state.context.session_secret, key_id)}"}
    assert http.get("/v1/runs", headers=forged).status_code == 401
    assert http.get("/v1/runs", headers=signed).status_code == 200
    assert http.post("/v1/runs", json={"key": "a"}, headers=signed).status_code == 201
    for site in ("same-site", "cross-site"):
        answer = http.post("/v1/runs", json={"key": "b"}, headers=signed | {"Sec-Fetch-Site": site})
        assert answer.status_code == 403
    database.write(lambda session: revoke_key(session, key_id))
    assert http.get("/v1/runs", headers=signed).status_code == 401


def test_loopback_addresses_are_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "box")))


def test_non_loopback_host_without_a_key_is_refused(settings: Settings, database: Database) -> None:
    wide = settings.model_copy(update={"host": "0.0.0.0"})
    prepare_keys(settings)
    with pytest.raises(ConfigurationError, match="foreshock keys create"):
        prepare_keys(wide)
    make_key(database, Scope.READ)
    prepare_keys(wide)


def test_bootstrap_key_is_created_once_with_admin_scope(settings: Settings, http: httpx.Client) -> None:
    secret = "a bootstrap key of a container"
    wide = Settings(**(settings.model_dump() | {"host": "0.0.0.0", "bootstrap_key": secret}))
    prepare_keys(wide)
    prepare_keys(wide)
    assert http.get("/v1/runs", headers=bearer(secret)).status_code == 200
    assert http.get("/v1/runs").status_code == 401
    assert secret not in str(wide.printable())
    assert wide.printable()["FORESHOCK_BOOTSTRAP_KEY"] == "********"


def test_bootstrap_key_is_used_without_the_newline_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_BOOTSTRAP_KEY", "a bootstrap key of a container\n")
    key = load_settings().bootstrap_key
    assert key is not None
    assert key.get_secret_value() == "a bootstrap key of a container"


def test_several_processes_require_postgresql() -> None:
    check_processes(Settings(processes=4, database_url="postgresql://user:pass@host/name"))
    with pytest.raises(ConfigurationError, match="PostgreSQL"):
        check_processes(Settings(processes=4))


def test_printed_settings_mask_secrets() -> None:
    shown = Settings(
        database_url="postgresql://user:hidden@host/name",
        store_url="s3://id:hidden@host/bucket",
        session_secret=SecretStr("s" * 24),
    ).printable()
    assert shown["FORESHOCK_STORE_URL"] == "s3://********@host/bucket"
    assert "hidden" not in str(shown)
    assert "s" * 24 not in str(shown)


def test_limits_of_a_table_are_settings_with_the_librarys_defaults() -> None:
    assert decode_limits(Settings()) == DecodeLimits()
    assert decode_limits(Settings(max_tokens=7)) == replace(DecodeLimits(), max_tokens=7)


@pytest.mark.parametrize("name", ["PUBLIC_URL", "GRAFANA_URL", "STORE_ENDPOINT"])
def test_setting_that_is_no_web_address_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"FORESHOCK_{name}", "collector:4318")
    with pytest.raises(ConfigurationError, match=f"FORESHOCK_{name}: .*must be an http:// or https:// address"):
        load_settings()
