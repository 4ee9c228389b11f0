"""The examples for Kubernetes and Slurm are valid and use settings that the worker has."""

from __future__ import annotations

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
from tests.paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "cluster"
SLURM = EXAMPLES / "slurm-worker.sh"
SETTINGS = {f"FORESHOCK_{name.upper()}" for name in WorkerSettings.model_fields}


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    """The strict schema of a Kubernetes Job."""
    found = json.loads((REPOSITORY / "tests" / "containers" / "data" / "kubernetes-job.json").read_text())
    return Draft202012Validator(found)


@pytest.fixture
def job() -> dict[str, Any]:
    document = yaml.safe_load((EXAMPLES / "kubernetes-worker.yaml").read_text())
    assert isinstance(document, dict)
    return document


def test_the_kubernetes_job_is_valid(schema: Draft202012Validator, job: dict[str, Any]) -> None:
    schema.validate(job)
    # The schema is strict, also deep in the document.
    wrong = copy.deepcopy(job)
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["allowPrivilege"] = False
    with pytest.raises(ValidationError, match="allowPrivilege"):
        schema.validate(wrong)


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
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FORESHOCK_URL": "http://foreshock:8765",
        "FORESHOCK_WEIGHTS_ROOTS": "checkpoints=/mnt/runs",
        "FORESHOCK_KEY_FILE": str(tmp_path / "key"),
        "SLURM_JOB_ID": "17",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    done = subprocess.run([SLURM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "fsk_key slurm-17-3-0 worker --until-idle 600\n"
    del environment["FORESHOCK_URL"]
    refused = subprocess.run([SLURM], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "FORESHOCK_URL" in refused.stderr
