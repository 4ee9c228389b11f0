"""docker-compose.yml is valid by the Compose Specification, refers only to what exists, and is safe by default."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from foreshock_service.platform.settings import Settings
from tests.paths import REPOSITORY

SCHEMA = Path(__file__).parent / "data" / "compose-spec.json"
VARIABLE = re.compile(r"\$\{(?P<name>[A-Z_]+)(?P<rule>:[?-][^}]*)?")

NESTED = re.compile(r"\$\{(?P<name>[A-Z_]+)(?::-(?P<default>(?:[^{}]|\$\{[^}]*\})*)|:\?[^}]*)?\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(SCHEMA.read_bytes()))


def source_of_bind(volume: Any) -> str | None:
    """Return the host path of a bind mount; None for a named volume."""
    if isinstance(volume, dict):
        return str(volume["source"]) if volume["type"] == "bind" else None
    source = str(volume).split(":", 1)[0]
    return source if source.startswith((".", "/")) else None


def environment_of(service: dict[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Return a service's environment as Compose substitutes it: `${NAME:-default}`, whose default may have others."""

    def substituted(text: str) -> str:
        return NESTED.sub(lambda match: variables.get(match["name"]) or substituted(match["default"] or ""), text)

    return {name: substituted(str(value)) for name, value in service["environment"].items()}


def name_of_volume(volume: Any) -> str | None:
    if isinstance(volume, dict):
        return str(volume["source"]) if volume["type"] == "volume" else None
    source = str(volume).split(":", 1)[0]
    return None if source.startswith((".", "/")) else source


def test_compose_file_is_valid_by_the_specification(compose: dict[str, Any], validator: Draft202012Validator) -> None:
    problems = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(compose)]
    assert not problems


def test_every_name_that_a_service_uses_exists(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, f"{name} waits for {needed}"
            if how["condition"] == "service_healthy":
                assert not services[needed]["healthcheck"].get("disable"), f"{name} waits for the health of {needed}"
        assert set(service.get("networks", [])) <= compose["networks"].keys(), name
        assert set(service.get("secrets", [])) <= compose["secrets"].keys(), name
        for volume in service.get("volumes", []):
            named = name_of_volume(volume)
            assert named is None or named in compose["volumes"], f"{name} mounts {named}"
    mounted = {name_of_volume(volume) for service in services.values() for volume in service.get("volumes", [])}
    assert compose["volumes"].keys() <= mounted, "no volume is declared and forgotten"


def test_every_file_that_is_mounted_or_built_from_exists(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if "build" in service:
            assert (REPOSITORY / service["build"]["context"] / service["build"]["dockerfile"]).is_file(), name
        for volume in service.get("volumes", []):
            source = source_of_bind(volume)
            # A path with a variable is the user's own folder; compose creates it if it is missing.
            if source is not None and "${" not in source:
                assert (REPOSITORY / source).exists(), f"{name} mounts {source}"


def test_images_are_pinned_to_a_version_and_a_digest(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        digest = "" if "build" in service else "@sha256:[0-9a-f]{64}"
        assert re.fullmatch(rf"[a-z/-]+:v?\d+\.\d+[\w.-]*{digest}", service["image"]), name
    for dockerfile in (REPOSITORY / "containers").glob("Dockerfile.*"):
        images = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
        assert images, dockerfile
        pinned = r"python:\d+\.\d+\.\d+-[a-z-]+@sha256:[0-9a-f]{64}"
        assert all(re.fullmatch(pinned, image) for image in images), dockerfile


def test_every_service_has_a_limit_of_memory_and_no_worker_has_the_administrators_key(
    services: dict[str, dict[str, Any]],
) -> None:
    assert [name for name, service in services.items() if "mem_limit" not in service] == []
    for name in ("worker", "worker-cuda"):
        assert services[name]["environment"]["FORESHOCK_API_KEY"] == "${FORESHOCK_WORKER_API_KEY:-}"
        assert "BOOTSTRAP" not in str(services[name])


def test_every_published_port_is_bound_to_loopback_by_default(services: dict[str, dict[str, Any]]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 5
    binds = ("${FORESHOCK_BIND:-127.0.0.1}:", "${FORESHOCK_PROXY_BIND:-127.0.0.1}:")
    assert all(port.startswith(binds) for port in ports)


def test_only_named_services_reach_the_stores(services: dict[str, dict[str, Any]], compose: dict[str, Any]) -> None:
    for name, network, others in (
        ("database", "data", {"service", "grafana-reader", "grafana"}),
        ("object-store", "objects", {"service"}),
    ):
        assert "ports" not in services[name]
        assert services[name]["networks"] == [network]
        assert compose["networks"][network]["internal"] is True
        assert {each for each in services if network in services[each]["networks"]} == {name} | others


@pytest.mark.parametrize("name", ["FORESHOCK_PUBLIC_URL", "FORESHOCK_GRAFANA_URL"])
def test_addresses_of_links_are_those_of_the_example(services: dict[str, dict[str, Any]], name: str) -> None:
    """Behind a proxy the pages have another address than the port that is bound to loopback."""
    address = "https://foreshock.example.org"
    assert environment_of(services["service"], {name: address})[name] == address
    host, port = {"FORESHOCK_PUBLIC_HOST": "gpu-1"}, {"FORESHOCK_PUBLIC_URL": 8765, "FORESHOCK_GRAFANA_URL": 3000}[name]
    assert environment_of(services["service"], host)[name] == f"http://gpu-1:{port}"
    assert environment_of(services["service"], {})[name] == f"http://localhost:{port}"
    assert name in (REPOSITORY / "docs" / "operations.md").read_text().partition("## Keep tokens")[0]


def test_proxy_bounds_slow_idle_and_large_requests() -> None:
    text = (REPOSITORY / "containers" / "Caddyfile").read_text()
    seconds = {"s": 1, "m": 60}
    timeouts = re.findall(r"^\s+(read_header|read_body|idle) (\d+)([sm])$", text, re.MULTILINE)
    assert {name for name, _, _ in timeouts} == {"read_header", "read_body", "idle"}
    # The client sends at most the largest body at 1 MiB/s, and keeps an idle connection for less than two minutes.
    longest = {name: int(number) * seconds[unit] for name, number, unit in timeouts}
    assert longest["read_body"] >= Settings().max_body_bytes / 2**20
    (most,) = re.findall(r"^\s+max_size (\d+)MB$", text, re.MULTILINE)
    assert int(most) * 10**6 > Settings().max_body_bytes
    assert re.search(r"^\s+max_header_size \d+KB$", text, re.MULTILINE)


def test_no_secret_is_written_in_the_file_and_empty_ones_are_refused() -> None:
    text = (REPOSITORY / "docker-compose.yml").read_text()
    for line in text.splitlines():
        if re.search(r"(PASSWORD|_KEY|_SECRET):", line):
            assert VARIABLE.search(line), line
    for match in VARIABLE.finditer(text):
        if match["name"].endswith(("PASSWORD", "BOOTSTRAP_KEY", "SESSION_SECRET")):
            assert (match["rule"] or "").startswith(":?"), f"{match['name']} may not be empty"


def test_every_variable_is_in_the_example_and_no_secret_has_a_value_there() -> None:
    used = {match["name"] for match in VARIABLE.finditer((REPOSITORY / "docker-compose.yml").read_text())}
    used |= set(
        re.findall(r"^    environment: ([A-Z_]+)$", (REPOSITORY / "docker-compose.yml").read_text(), re.MULTILINE)
    )
    example = dict(
        line.split("=", 1)
        for line in (REPOSITORY / ".env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert used == example.keys()
    assert all(not value for name, value in example.items() if name.endswith(("PASSWORD", "KEY", "SECRET")))


def test_containers_do_not_run_as_root_and_ship_no_secret() -> None:
    for dockerfile in (REPOSITORY / "containers").glob("Dockerfile.*"):
        text = dockerfile.read_text()
        assert re.search(r"^USER \d{4,}$", text, re.MULTILINE), dockerfile
        assert not re.search(r"PASSWORD|API_KEY", text), dockerfile
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert "*" in ignored, "the build context is an allow-list, so that .env never reaches an image"
    for path in (line.removeprefix("!") for line in ignored if line.startswith("!")):
        assert (REPOSITORY / path).exists(), path


def test_the_build_context_holds_everything_that_the_wheel_is_built_of() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {package.partition("/")[0] for package in wheel["packages"]}
    needed = {*packages, *wheel["force-include"], project["project"]["readme"], "LICENSE", "pyproject.toml"}
    allowed = {line.removeprefix("!") for line in (REPOSITORY / ".dockerignore").read_text().splitlines()}
    assert needed <= allowed
