"""The examples for Kubernetes and Slurm are valid and use settings that the worker has."""

import copy
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from foreshock_probes.settings import WorkerSettings
from foreshock_service.platform.settings import Settings
from tests.paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "cluster"
SLURM = EXAMPLES / "slurm-worker.sh"
SETTINGS = {f"FORESHOCK_{name.upper()}" for name in WorkerSettings.model_fields}


def validate(document: dict[str, Any]) -> None:
    """Check a document by the strict schema of its kind."""
    found = json.loads((REPOSITORY / "tests" / "containers" / "data" / "kubernetes.json").read_text())
    kind = found.pop("kinds")[document["kind"]]
    Draft202012Validator(found | kind).validate(document)


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Return the documents of a file by their kind."""
    found = list(yaml.safe_load_all((EXAMPLES / name).read_text()))
    return {document["kind"]: document for document in found}


@pytest.fixture
def job() -> dict[str, Any]:
    return documents("kubernetes-worker.yaml")["Job"]


@pytest.fixture
def service() -> dict[str, dict[str, Any]]:
    return documents("kubernetes-service.yaml")


def test_kubernetes_documents_are_valid(job: dict[str, Any], service: dict[str, dict[str, Any]]) -> None:
    assert set(service) == {"PersistentVolumeClaim", "Deployment", "Service"}
    for document in (job, *service.values()):
        validate(document)
    # The schema is strict, also deep in the document.
    for document in (job, service["Deployment"]):
        wrong = copy.deepcopy(document)
        wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["allowPrivilege"] = False
        with pytest.raises(ValidationError, match="allowPrivilege"):
            validate(wrong)


def test_kubernetes_service_fits_image_and_workers(job: dict[str, Any], service: dict[str, dict[str, Any]]) -> None:
    pod = service["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert set(variables) <= {f"FORESHOCK_{name.upper()}" for name in Settings.model_fields}
    dockerfile = (REPOSITORY / "containers" / "Dockerfile.service").read_text()
    assert f"VOLUME {container['volumeMounts'][0]['mountPath']}" in dockerfile
    assert f"USER {pod['spec']['securityContext']['runAsUser']}" in dockerfile
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
    # The probes and the workers come with a Host that the service allows.
    (port,) = service["Service"]["spec"]["ports"]
    address = f"http://{service['Service']['metadata']['name']}:{port['port']}"
    worker = {each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert worker["FORESHOCK_URL"] == address
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        (host,) = container[name]["httpGet"]["httpHeaders"]
        assert (host["name"], host["value"]) == ("Host", variables["FORESHOCK_ALLOWED_HOSTS"])
    assert variables["FORESHOCK_ALLOWED_HOSTS"] == service["Service"]["metadata"]["name"]
    assert service["Service"]["spec"]["selector"] == pod["metadata"]["labels"]


def test_kubernetes_containers_have_a_limit_of_memory_and_no_rights(
    job: dict[str, Any], service: dict[str, dict[str, Any]]
) -> None:
    for document in (job, service["Deployment"]):
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert "memory" in container["resources"]["limits"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["runAsNonRoot"] is True
        keys = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "KEY" in each["name"]]
        assert keys, "keys come from secrets"
    # A worker has a secret of its own, not the administrator's.
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    names = {each["valueFrom"]["secretKeyRef"]["name"] for each in worker["env"] if "KEY" in each["name"]}
    assert names == {"foreshock-worker"}


def test_the_kubernetes_job_names_settings_mounts_and_a_long_enough_grace(job: dict[str, Any]) -> None:
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert set(variables) <= SETTINGS
    assert pod["terminationGracePeriodSeconds"] > WorkerSettings.model_fields["shutdown_grace_seconds"].default
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    (root,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "checkpoints"]
    settings = WorkerSettings(weights_roots=variables["FORESHOCK_WEIGHTS_ROOTS"])
    assert settings.weights_roots == {"checkpoints": Path(root)}


def test_the_slurm_script_is_valid_bash_and_names_settings() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True)
    text = SLURM.read_text()
    named = set(re.findall(r"FORESHOCK_[A-Z_]+", text)) - {"FORESHOCK_KEY_FILE"}
    assert named <= SETTINGS
    assert os.access(SLURM, os.X_OK)
    # All directives come before the first command, else Slurm ignores them.
    commands = [number for number, line in enumerate(text.splitlines()) if line and not line.startswith("#")]
    directives = [number for number, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")]
    assert max(directives) < min(commands)


def test_the_slurm_script_starts_a_worker_with_its_key_and_a_name_of_its_own(tmp_path: Path) -> None:
    for name, body in (("srun", 'exec "$@"'), ("foreshock", 'echo "$FORESHOCK_API_KEY $FORESHOCK_WORKER_NAME $*"')):
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    (tmp_path / "key").write_text("fsk_key\n")
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "FORESHOCK_URL": "http://foreshock:8765",
        "FORESHOCK_WEIGHTS_ROOTS": "checkpoints=/mnt/runs", "FORESHOCK_KEY_FILE": str(tmp_path / "key"),
        "SLURM_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3",
    }  # fmt: skip
    done = subprocess.run([SLURM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "fsk_key slurm-17-3-0 worker --until-idle 600\n"
    del environment["FORESHOCK_URL"]
    refused = subprocess.run([SLURM], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "FORESHOCK_URL" in refused.stderr
