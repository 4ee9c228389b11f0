"""Runs with little, odd or broken data, each sent as its trainer would send it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
from sqlalchemy import insert
from sqlalchemy.orm import Session

from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Alert
from foreshock_service.platform.database.tables.base import new_identifier
from foreshock_service.runs import due
from tests.service.sending import Sender, make_batch, start_run

STEPS, ALERTS, SCALARS = 30, 500, 10_000
MARKUP = "<b onclick=alert(1)>&amp;</b><a href='javascript:alert(2)'>"
LONG_NAME = "a_name_without_a_place_to_break_" * 6 + "of_200__"
RIGHT_TO_LEFT = "‮תצפית של אימון <b>1</b> — تجربة التدريب"


def _steps(sender: Sender, change: Callable[[RolloutBatch], RolloutBatch], steps: int = STEPS) -> None:
    for step in range(1, steps + 1):
        sender.put_shard(step, change(make_batch(16, seed=step))).raise_for_status()


def _nothing(sender: Sender) -> None:
    """Send no step."""


def _one_rollout(sender: Sender) -> None:
    sender.put_shard(1, make_batch(1)).raise_for_status()


def _only_lengths(sender: Sender) -> None:
    _steps(sender, lambda batch: replace(batch, rollout_log_probs=None, trainer_log_probs=None, reward=None))


def _no_reward(sender: Sender) -> None:
    _steps(sender, lambda batch: replace(batch, reward=None))


def _markup(sender: Sender) -> None:
    """Send markup in every text that a run has."""
    made = Fingerprint(engine=MARKUP, dtype=MARKUP)

    def marked(batch: RolloutBatch) -> RolloutBatch:
        texts: list[str | None] = [f"{MARKUP}{number}" for number in range(batch.num_rollouts)]
        attributes = replace(batch.attributes, engine_fingerprint=made)
        return replace(
            batch,
            sample_ids=[str(each) for each in texts],
            group_ids=texts,
            finish_reasons=texts,
            attributes=attributes,
        )

    for step in range(1, 3):
        sender.put_scalars(step, {MARKUP: 1.0, f"{MARKUP}/x": float(step)}).raise_for_status()
    _steps(sender, marked, 2)


def _many_scalars(sender: Sender) -> None:
    names = [f"{'a_long_name_' * 15}{number:05d}" for number in range(SCALARS)]
    for first in range(0, SCALARS, 1000):
        sender.put_scalars(1, dict.fromkeys(names[first : first + 1000], 0.5)).raise_for_status()


def _only_scalars(sender: Sender) -> None:
    for step in range(1, STEPS + 1):
        sender.put_scalars(step, {"reward": step / STEPS, "custom/odd name": -step, "lr": 1e-6}).raise_for_status()


def _nan_everywhere(sender: Sender) -> None:
    def spoiled(batch: RolloutBatch) -> RolloutBatch:
        nan = np.full(batch.num_tokens, np.nan, np.float32)
        reward = np.full(batch.num_rollouts, np.nan, np.float32)
        return replace(batch, rollout_log_probs=nan, trainer_log_probs=nan, reward=reward)

    for step in range(1, STEPS + 1):
        sender.put_scalars(step, {"grad_norm": None, "entropy": None}).raise_for_status()
    _steps(sender, spoiled)


def _being_written(sender: Sender) -> None:
    _steps(sender, lambda batch: batch, 5)
    for rank in range(2):
        sender.put_shard(6, make_batch(8, seed=60 + rank), rank, 4).raise_for_status()


KINDS: Mapping[str, tuple[Callable[[Sender], None], dict[str, Any]]] = {
    "nothing": (_nothing, {}),
    "one step": (lambda sender: _steps(sender, lambda batch: batch, 1), {}),
    "one rollout": (_one_rollout, {}),
    "only lengths": (_only_lengths, {}),
    "only scalars": (_only_scalars, {}),
    "no reward": (_no_reward, {}),
    "10,000 scalars": (_many_scalars, {}),
    MARKUP: (_markup, dict.fromkeys(("model", "trainer", "engine", "hardware", "note"), MARKUP) | {"tags": [MARKUP]}),
    "NaN everywhere": (_nan_everywhere, {}),
    LONG_NAME: (lambda sender: _steps(sender, lambda batch: batch, 3), {"model": LONG_NAME, "engine": LONG_NAME}),
    RIGHT_TO_LEFT: (lambda sender: _steps(sender, lambda batch: batch, 3), {"note": RIGHT_TO_LEFT, "tags": ["ימין"]}),
    "500 alerts": (lambda sender: _steps(sender, lambda batch: batch), {}),
    "being written": (_being_written, {}),
}
"""Name of a run → what sends its steps, and its fields."""


def send_bad_runs(http: httpx.Client, database: Database) -> dict[str, str]:
    """Send all of them; return their ids by name."""
    ids = {}
    for name, (send, fields) in KINDS.items():
        sender = start_run(http, name, name=name, project="bad", **fields)
        send(sender)
        ids[name] = sender.run
    database.write(lambda session: _open_alerts(session, ids["500 alerts"]))
    return ids


def _open_alerts(session: Session, run: str) -> None:
    severities = ("critical", "warning", "info")
    rows = [
        {
            "id": new_identifier("alert"), "run_id": run, "attempt": 1, "rule": f"rule_of_a_file_{number}",
            "step": 1 + number // 50, "severity": severities[number % 3], "value": 1.5, "threshold": 1.0,
            "why": f"scalar {number} is above 1", "what_to_do": "Look at the scalar.", "moves_learning_rate": False,
            "evidence": {}, "state": "open", "changed_by": "detector", "version": 1000 + number, "opened_at_us": 1,
            "changed_at_us": 1,
        }
        for number in range(ALERTS)
    ]  # fmt: skip
    session.execute(insert(Alert), rows)
    due.mark(session, run)
