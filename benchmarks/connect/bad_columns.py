"""Part `bad_columns` of `make bench-connect`: bad values in each column that a hook observes, to the page of the run.

    python -m benchmarks.connect bad_columns

Real: the hooks, the client and the service, TRL's trainer and verl's `RayPPOTrainer`. slime's rollout data are made
after its documented schema, and a batch for a `Connection` after NeMo-RL's. Each row changes one column: another
length, NaN, ±inf, another dtype, text, nothing. What arrives is compared with what the hook was given: `logged` (the
values arrive as they are), `refused` (one sentence in the trainer's log, which the diagnosis repeats, and the rest
arrives), `silent` (no sentence), `unsaid` (the diagnosis does not repeat it) or `wrong` (other values arrive, or
the hook fails).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import httpx
import numpy as np
import torch

from benchmarks.bars import Line
from benchmarks.connect import mutations
from benchmarks.running_service import service, wait_until_advanced
from foreshock.client.client import Client
from foreshock.client.reporting import LogOnce
from foreshock.integrations.hooks import guard

LENGTHS: Final = (3, 6, 4, 5)
SIZE: Final = len(LENGTHS)
Rows = list[Any]
Change = Callable[[Rows], Any]


def _typed(kind: Any) -> Change:
    return lambda rows: [np.asarray(row).astype(kind) for row in rows]


def _put(value: float) -> Change:
    return lambda rows: [np.where(np.arange(len(row)) == 1, value, np.asarray(row, np.float32)) for row in rows]


# What is done to a column of a row of numbers for each rollout.
CHANGES: Final[Mapping[str, Change]] = {
    "as it is": lambda rows: rows,
    "one value short": lambda rows: [row[:-1] for row in rows],
    "one value more": lambda rows: [np.append(row, -0.5) for row in rows],
    "of one rollout less": lambda rows: rows[:-1],
    "NaN at one token": _put(float("nan")),
    "NaN at each token": lambda rows: [np.full(np.shape(row), np.nan, np.float32) for row in rows],
    "-inf at one token": _put(-float("inf")),
    "+inf at one token": _put(float("inf")),
    "float64": _typed(np.float64),
    "float16": _typed(np.float16),
    "integers": _typed(np.int64),
    "text": _typed(str),
    "one number for each rollout": lambda rows: [float(np.mean(row)) for row in rows],
    "nothing": lambda _: None,
}


@dataclass
class Case:
    """What a hook was given of the changed column, what its client logged, and what was said of it where."""

    given: Any
    logged: Any
    others_arrived: bool
    sentences: list[str] = field(default_factory=list)
    page: list[str] = field(default_factory=list)
    failed: bool = False
    is_finite: bool = True

    @property
    def outcome(self) -> str:
        """Return logged, refused, silent, unsaid or wrong."""
        if self.failed or not self.others_arrived:
            return "wrong"
        if self.logged is not None:
            if not _same(self.given, self.logged):
                return "wrong"
            return "logged" if self.is_finite or _names_not_finite(self.page) else "unsaid"
        if not self.sentences:
            return "silent"
        return "refused" if any(_repeats(self.page, each) for each in self.sentences) else "unsaid"


def _same(given: Any, logged: Any) -> bool:
    try:
        return len(given) == len(logged) and all(
            np.allclose(np.float32(a), np.float32(b), atol=1e-3, equal_nan=True)
            for a, b in zip(given, logged, strict=True)
        )
    except (TypeError, ValueError):
        return False


def _names_not_finite(page: list[str]) -> bool:
    return any(word in each for each in page for word in ("NaN", "inf", "no reward is logged"))


def _repeats(page: list[str], sentence: str) -> bool:
    return any(sentence.rstrip(".")[:200].lower() in each.lower() for each in page)


class _Recording(Client):
    """The client, which also keeps the columns of its newest batch."""

    newest: Any = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.columns: dict[str, Any] = {}
        _Recording.newest = self

    def log_rollouts(self, step: int, rollouts: Any, **keywords: Any) -> None:
        """Log the rollouts, and keep the rows of each column of the batch that is sent."""
        from foreshock.client.capture import capture_rollouts

        try:
            batch = capture_rollouts(rollouts, default_ids="row", attributes=None)()
        except Exception:
            batch = None
        super().log_rollouts(step, rollouts, **keywords)
        if batch is None:
            return
        for name in rollouts:
            values = getattr(batch, name, None)
            if isinstance(values, np.ndarray):
                of_tokens = values.shape == batch.response_token_ids.shape
                self.columns[name] = np.split(values, batch.response_offsets[1:-1]) if of_tokens else list(values)


# --- The hooks: each takes the column to change and the change, and returns what the column was given. ----------------


def _random() -> np.random.Generator:
    return np.random.default_rng(7)


def _log_probs(random: np.random.Generator) -> Rows:
    return [(-random.random(length) - 0.01).astype(np.float32) for length in LENGTHS]


def _slime(column: str, change: Change) -> Any:
    """Give a step's rollout data to the hook of slime's training process."""
    from foreshock.integrations.slime import SlimeRun
    from foreshock.integrations.slime_framework import FRAMEWORKS, Place

    random = _random()
    prompts = 2
    data: dict[str, Any] = {
        "partition": list(range(SIZE)),
        "tokens": [torch.from_numpy(random.integers(1, 50, prompts + length)) for length in LENGTHS],
        "total_lengths": [prompts + length for length in LENGTHS],
        "response_lengths": list(LENGTHS),
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in LENGTHS],
        "truncated": [0] * SIZE,
        "sample_indices": list(range(SIZE)),
        "local_raw_reward": [1.0, 0.0, 0.0, 1.0],
        "weight_versions": [["7"]] * SIZE,
        "rollout_log_probs": _log_probs(random), "log_probs": _log_probs(random), "entropy": _log_probs(random),
        "advantages": [np.full(length, 0.5, np.float32) for length in LENGTHS],
        "num_microbatches": [1],
    }  # fmt: skip
    given = change(data[column])
    for name in ("rollout_log_probs", "log_probs", "entropy", "advantages"):
        data[name] = _tensors(given if name == column else data[name])
    if column not in ("rollout_log_probs", "log_probs", "entropy", "advantages"):
        data[column] = given
    log = LogOnce("foreshock.integrations.slime")
    arguments = SimpleNamespace(n_samples_per_prompt=2, colocate=False, rollout_top_p=1.0, num_rollout=9)
    run = SlimeRun(arguments, FRAMEWORKS[0], Place(0, 1, has_rollouts=True, context_rank=0, context_size=1), log)
    guard(lambda: run.take_rollouts(1, data), log, "log_rollouts")
    guard(run.end_step, log, "the end of the step")
    if run.feed is not None:
        run.feed.close()
    return given


def _tensors(rows: Any) -> Any:
    """Return a row of numbers as a tensor, as the framework has it; anything else as it is."""
    if rows is None:
        return None
    return [torch.from_numpy(row) if isinstance(row, np.ndarray) and row.dtype.kind in "fiub" else row for row in rows]


def _connection(column: str, change: Change) -> Any:
    """Give a batch of padded columns, as NeMo-RL has it, to a `Connection`."""
    from foreshock.integrations.connect import Connection

    random = _random()
    width = 2 + max(LENGTHS)
    batch: dict[str, Any] = {
        "token_ids": random.integers(1, 50, (SIZE, width)),
        "token_loss_mask": [np.ones(length, np.int64) for length in LENGTHS],
        "generation_logprobs": _log_probs(random),
        "prev_logprobs": _log_probs(random),
        "advantages": [np.full(length, 0.5, np.float32) for length in LENGTHS],
        "input_lengths": np.array(LENGTHS) + 2,
        "rewards": np.array([1.0, 0.0, 0.0, 1.0]),
    }
    given = change(list(batch[column]))
    batch[column] = given
    for name in ("token_loss_mask", "generation_logprobs", "prev_logprobs", "advantages"):
        batch[name] = _padded(batch[name], width)
    run = Connection("nemo-rl")
    run.log_rollouts(1, batch)
    run.log_metrics(1, {"loss": 0.5})
    if run.feed is not None:
        run.feed.close()
    return given


def _padded(rows: Any, width: int, left: int = 2) -> Any:
    """Return rows of numbers as a tensor [N, width] that begins with `left` zeros; anything else as it is.

    Rows of another length than the responses widen the tensor, as they would in the framework.
    """
    if not isinstance(rows, list) or any(
        not isinstance(row, np.ndarray) or row.dtype.kind not in "fiub" for row in rows
    ):
        return rows
    more = max((len(row) - length for row, length in zip(rows, LENGTHS, strict=False)), default=0)
    matrix = np.zeros((len(rows), width + more), rows[0].dtype)
    for place, row in enumerate(rows):
        matrix[place, left : left + len(row)] = row
    return torch.from_numpy(matrix)


def _verl(column: str, change: Change) -> Any:
    """Let a derived trainer of verl compute the advantages of a batch with a changed column."""
    from verl import DataProto

    given: list[Any] = []

    def changed(data: Any) -> Any:
        tensors = {name: data.batch[name] for name in data.batch.keys()}  # noqa: SIM118
        rows = [row[:length].numpy() for row, length in zip(tensors[column], LENGTHS, strict=True)]
        given.append(change(rows))
        tensors.pop(column)
        value = _padded(given[0], max(LENGTHS), left=0)
        if value is not None:
            tensors[column] = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        return DataProto.from_dict(tensors=tensors, non_tensors=dict(data.non_tensor_batch))

    mutations.verl_seen(changed, client=_Recording)
    return given[0]


def _trl(column: str, change: Change) -> Any:
    """Let TRL's trainer generate and score once, with a changed column."""
    from trl import GRPOTrainer

    given: list[Any] = []

    def of_generated(result: Any) -> Any:
        given.append(change([np.asarray(row, np.float32) for row in result[4]]))
        return (*result[:4], given[0], *result[5:])

    def of_scored(result: Any) -> Any:
        rows = [row[:length].numpy() for row, length in zip(result[column], LENGTHS, strict=True)]
        given.append(change(rows))
        value = _padded(given[0], max(LENGTHS), left=0)
        return {**result, column: value if isinstance(value, torch.Tensor) else torch.tensor(value)}

    def client(hook: LogOnce) -> Client:
        made = _Recording()
        made.tell_remarks_of(hook)
        made.start_run(resume_step=1)
        return made

    generated = column == "logprobs"
    method = "_generate" if generated else "_generate_and_score_completions"
    mutations.trl_seen(_FOLDER, GRPOTrainer, {method: of_generated if generated else of_scored}, client)
    return given[0]


_FOLDER = Path()
COLUMNS: Final[Mapping[str, tuple[Callable[[str, Change], Any], Mapping[str, str]]]] = {
    "slime": (_slime, {"rollout_log_probs": "rollout_log_probs", "log_probs": "trainer_log_probs",
                       "advantages": "advantage", "entropy": "entropy", "local_raw_reward": "reward"}),
    "connect": (_connection, {"generation_logprobs": "rollout_log_probs", "prev_logprobs": "trainer_log_probs",
                              "advantages": "advantage", "rewards": "reward"}),
    "verl": (_verl, {"rollout_log_probs": "rollout_log_probs", "old_log_probs": "trainer_log_probs",
                     "advantages": "advantage"}),
    "TRL": (_trl, {"logprobs": "rollout_log_probs", "old_per_token_logps": "trainer_log_probs"}),
}  # fmt: skip
"""For each hook the columns that are changed: the framework's name of each → the client's."""

_NOT_FINITE: Final = ("NaN at one token", "NaN at each token", "-inf at one token", "+inf at one token")
_ONE_OF_A_ROLLOUT: Final = ("local_raw_reward", "rewards")


def _changes(framework: str, column: str) -> list[str]:
    """Return the changes that a framework's column can have: a tensor holds no text, and a batch one size."""
    left_out = {"text", "of one rollout less"} if framework in ("verl", "TRL") and column != "logprobs" else set()
    if column in ("advantages", "entropy") or (column, framework) == ("old_per_token_logps", "TRL"):
        left_out.add("nothing")  # Not every algorithm has them; TRL's forward pass is observed too.
    if framework == "connect":
        left_out.add("one value short")  # A padded matrix ends in zeros all the same.
    if column in _ONE_OF_A_ROLLOUT:
        left_out |= {
            "one value short",
            "one value more",
            "one number for each rollout",
            *_NOT_FINITE[:1],
            *_NOT_FINITE[2:],
            "nothing",
        }  # Without rewards the diagnosis says so by itself.
    return [name for name in CHANGES if name not in left_out]


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []
        self.failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a sentence."""
        self.sentences.append(record.getMessage())
        self.failed |= record.exc_info is not None


def _case(http: httpx.Client, framework: str, column: str, name: str) -> Case:
    """Run one case with a run of its own, and read its diagnosis once the service has advanced it."""
    hook, names = COLUMNS[framework]
    os.environ["FORESHOCK_RUN_KEY"] = f"{framework} {column} {name}"
    notes, _Recording.newest = _Notes(), None
    logging.getLogger("foreshock").addHandler(notes)
    try:
        given = hook(column, CHANGES[name])
        client = _Recording.newest
        if client is not None:
            client.close(60)
    finally:
        logging.getLogger("foreshock").removeHandler(notes)
    case = Case(
        given, None, client is not None, notes.sentences, failed=notes.failed, is_finite=name not in _NOT_FINITE
    )
    if client is None or client.run_id is None:
        return case
    logged = client.columns
    case.logged = logged.get(names[column])
    needed = {*names.values()} - {names[column]}
    if column == "log_probs" and name == "nothing":
        needed.remove("entropy")  # It would come with them, from the forward pass of the loss.
    case.others_arrived = needed <= logged.keys()
    wait_until_advanced(http, client.run_id)
    found = http.get(f"/v1/runs/{client.run_id}/diagnosis").raise_for_status().json()
    alerts = http.get(f"/v1/runs/{client.run_id}/alerts").raise_for_status().json()["items"]
    case.page = [each["sentence"] for each in (*found["missing"], *found["causes"])] + [each["why"] for each in alerts]
    return case


def run() -> list[Line]:
    """Print the outcome of each case, and return their counts."""
    global _FOLDER
    from verl.trainer.ppo import ray_trainer  # noqa: F401 - before there is an address: the hook would observe it twice

    from foreshock.integrations import trainer_run

    trainer_run.__dict__["Client"] = _Recording
    counts = dict.fromkeys(("logged", "refused", "silent", "unsaid", "wrong"), 0)
    with tempfile.TemporaryDirectory() as folder, service() as (_, http):
        _FOLDER = Path(folder)
        os.environ.update(FORESHOCK_URL=str(http.base_url), FORESHOCK_SPOOL_DIRECTORY=f"{folder}/spool")
        for framework, (_, names) in COLUMNS.items():
            for column in names:
                for name in _changes(framework, column):
                    case = _case(http, framework, column, name)
                    outcome = case.outcome
                    counts[outcome] += 1
                    said = "" if outcome == "logged" else f": {(case.sentences or ['-'])[0][:300]}"
                    print(f"{framework:8} {outcome:8} {column}: {name}{said}", flush=True)
    bad = ("silent", "unsaid", "wrong")
    return [
        Line(f"columns_{each}", f"columns: {each}", count, 0 if each in bad else None) for each, count in counts.items()
    ]
