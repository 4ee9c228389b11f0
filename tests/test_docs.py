"""The documents agree with the code: README's Python runs; settings, commands and files that they name exist."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from benchmarks.running_service import forked_service
from foreshock.client.settings import FROM_ENVIRONMENT
from foreshock.commands.command import SuggestingParser
from foreshock.commands.main import ENTRY_POINT_GROUP
from foreshock_probes.settings import WorkerSettings
from foreshock_service.platform.settings import Settings
from tests.paths import DOCS, REPOSITORY

DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def batch(seed: int) -> dict[str, object]:
    """Return 8 rollouts of up to 30 tokens as a trainer holds them."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 30, 8)
    engine = [(-random.exponential(1.0, n)).astype(np.float32) for n in lengths]
    return {
        "prompt_token_ids": [[1, 2, 3]] * 8,
        "response_token_ids": [random.integers(0, 100, n) for n in lengths],
        "rollout_log_probs": engine,
        "trainer_log_probs": [np.minimum(row + np.float32(1e-3), 0) for row in engine],
        "group_id": [f"prompt-{i // 4}" for i in range(8)],
    }


@pytest.mark.slow
def test_the_readmes_python_connects_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert len(code.strip().splitlines()) <= 14
    monkeypatch.setenv("FORESHOCK_SPOOL_DIRECTORY", str(tmp_path / "spool"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    settings = {"FORESHOCK_TOKEN_PASS": "numpy", "FORESHOCK_DECODE_PROCESSES": "1"}
    with forked_service(tmp_path, **settings) as address:
        names: dict[str, Any] = {
            "batches": [batch(seed) for seed in range(5)],
            "optimizer": optimizer,
            "train": lambda _: 0.25,
        }
        exec(code.replace("http://127.0.0.1:8765", address), names)
        client, feed = names["client"], names["feed"]
        assert client.flush(300)
        measured = httpx.get(
            f"{address}/v1/runs/{client.run_id}/measurements",
            params={"comparison": "trainer/rollout"},
            timeout=60,
        ).json()["columns"]
        feed.close()
        client.close()
    assert measured["step"] == [1, 2, 3, 4, 5]
    assert all(value > 0 for value in measured["k3_kl"])
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_every_file_that_a_document_names_exists() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        links = [document.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
        code = [
            REPOSITORY / name
            for name in re.findall(r"`([a-z_-]+/[a-z_./-]+)`", text)
            if name.split("/")[0] in ("foreshock", "service", "probes", "dashboards", "examples", "docs", "containers")
        ]
        missing = [str(path) for path in links + code if not path.exists()]
        assert not missing, document.name


def test_every_setting_that_a_document_names_exists() -> None:
    fields = (*Settings.model_fields, *WorkerSettings.model_fields, *FROM_ENVIRONMENT)
    sources = [path for part in ("foreshock", "service", "probes") for path in (REPOSITORY / part).rglob("*.py")]
    texts = [path.read_text() for path in (*sources, REPOSITORY / "docker-compose.yml")]
    known = {f"FORESHOCK_{name.upper()}" for name in fields}
    known |= {name for text in texts for name in re.findall(r"\bFORESHOCK_[A-Z_]+\b", text)}
    for document in DOCUMENTS:
        named = set(re.findall(r"\bFORESHOCK_[A-Z_]+\b", document.read_text()))
        assert named <= known, document.name


def commands_of(document: Path) -> list[list[str]]:
    """Return the `foreshock` commands that a document shows, as words without settings before them."""
    blocks = "".join(re.findall(r"```(?:bash|sh)?\n(.*?)```", document.read_text(), re.DOTALL)).replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*foreshock ([a-z]+\b.*)", blocks, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_every_command_that_a_document_shows_has_these_arguments(document: Path) -> None:
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name, *arguments in commands_of(document):
        parser = SuggestingParser(prog=name, exit_on_error=False)
        points[name].load().configure(parser)
        parser.parse_args(arguments)


# Questions that "Where to change what" must answer, by words of its row.
QUESTIONS = (
    "choice of k of the Pareto estimator",
    "late shard folds a step again",
    "longest long poll of the advice",
    "what a worker does when vLLM crashes",
    "minimum decay period",
    "caps on an uploaded file",
    "response header",
    "column of the rollout table",
    "new scorer, such as `sglang.http`",
    "new alert rule",
    "which variant is the noise floor",
    "cut of exported runs",
    "down-sampling of curves",
    "new trainer integration",
    "bytes that the spool may hold",
)


def changes() -> dict[str, tuple[Path, str]]:
    """Return the rows of "Where to change what": what -> (file or folder, name in it)."""
    text = (DOCS / "where-to-change-what.md").read_text().partition("## I want to change")[2]
    rows = re.findall(r"^\| (.+?) \| `([^`]+)` \| (?:`([^`]+)` )?\|$", text, re.MULTILINE)
    return {what: (REPOSITORY / path, name) for what, path, name in rows}


def test_where_to_change_what_names_files_and_names_that_exist() -> None:
    rows = changes()
    assert 30 <= len(rows) <= 40
    for what, (path, name) in rows.items():
        assert path.exists(), (what, path)
        assert not name or re.search(rf"\b{re.escape(name)}\b", path.read_text()), (what, path, name)


def test_where_to_change_what_answers() -> None:
    rows = changes()
    assert [question for question in QUESTIONS if not any(question in what for what in rows)] == []
