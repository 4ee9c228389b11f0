"""Part `files` of `make bench-connect`: files in public layouts, as their current writers write them.

    python -m benchmarks.connect files

Each is read as `foreshock import` reads it. `read`: every column that the file has arrived with its values, and every
other name was listed; `refused`: one sentence says what to do; `silent`: something is left out without a word; `wrong`.
The dumps of prime-rl, NeMo-RL, slime, miles and SkyRL were written by their own writers
(`tests/foreshock/importers/dumps`); the others are rows with the fields of the writer's source.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bars import Line
from foreshock.commands.import_dumps import chosen_format, read_options, sampling_attributes
from foreshock.commands.import_rollouts import command
from foreshock.errors import ForeshockError
from foreshock.importers import find_dumps
from foreshock.importers.recordings import find_recording, read_recorded
from foreshock.rollouts import RolloutBatch, encode_rollouts

DUMPS = Path(__file__).parents[2] / "tests" / "foreshock" / "importers" / "dumps"

TRUE: dict[str, list[Any]] = {
    "prompt_token_ids": [[1, 2], [1, 2]], "response_token_ids": [[3, 4, 5], [6, 7]],
    "rollout_log_probs": [[-0.5, -1.0, -0.25], [-2.0, -0.125]],
    "trainer_log_probs": [[-0.75, -1.0, -0.25], [-1.5, -0.125]], "response_mask": [[1, 0, 1], [1, 1]],
    "advantage": [0.5, -0.5], "reward": [1.0, 0.0], "finish_reason": ["stop", "length"],
    "sample_id": ["a", "b"], "group_id": ["p", "p"], "data_source": ["sums", "sums"],
}  # fmt: skip
"""The rollouts of every file that is made here, by column."""


@dataclass(frozen=True, slots=True)
class File:
    """`write(folder)` returns the words of `foreshock import`. `columns`: those that must arrive; none: refused.

    `rollouts`: how many, if they are not those of TRUE; `other`: names that must be listed.
    """

    write: Callable[[Path], Sequence[Path | str]]
    columns: tuple[str, ...] = ()
    rollouts: int = 2
    other: tuple[str, ...] = ()
    says: str = ""


def read_as_import(words: Sequence[Path | str]) -> tuple[list[RolloutBatch], list[str]]:
    """Return the batches that `foreshock import` would log, and its remarks. Raises ForeshockError."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    arguments = parser.parse_args([*map(str, words), "--run-key", "files", "--allow-pickle"])
    kind, notes = chosen_format(arguments), list[str]()
    options = read_options(arguments, sampling_attributes(arguments))
    read = read_recorded if kind is None else kind.read
    if kind is not None:
        dumps = find_dumps(kind.name, arguments.paths[0])
    else:
        found = find_recording(arguments.paths, step=arguments.step, options=options)
        dumps, notes = [*found.dumps], [f"not read: {path.name}" for path in found.unread]
    steps = [read(dump, options) for dump in dumps]
    notes += [note for step in steps for note in (*step.notes, *(sentence for _, sentence in step.left_out))]
    return [batch for step in steps for batch in step.batches], notes


def outcome(file: File, folder: Path) -> tuple[str, str]:
    """Return read, refused, silent or wrong, and the sentence of a refusal."""
    try:
        batches, notes = read_as_import(file.write(folder))
    except ForeshockError as error:
        text = str(error)
        return ("refused" if not file.columns and file.says in text and len(text) > 40 else "wrong"), text
    if not file.columns:
        return "silent", "it was read"
    if sum(batch.num_rollouts for batch in batches) != file.rollouts:
        return "silent", f"{sum(batch.num_rollouts for batch in batches)} rollouts"
    batch = RolloutBatch.concat(batches)
    fields = {"sample_id": "sample_ids", "group_id": "group_ids", "finish_reason": "finish_reasons",
              "data_source": "data_sources"}  # fmt: skip
    for name in file.columns:
        values = getattr(batch, fields.get(name, name))
        if values is None:
            return "silent", name
        if file.rollouts == 2 and not _equal(values, TRUE[name]):
            return "wrong", name
    absent = [name for name in file.other if not any(name in note for note in notes)]
    return ("silent", absent[0]) if absent else ("read", "")


def _equal(values: Any, rows: list[Any]) -> bool:
    if isinstance(rows[0], str):
        return list(values) == rows
    flat = np.concatenate([np.atleast_1d(row) for row in rows])
    return len(values) == len(flat) and bool(np.allclose(values, flat, atol=1e-6))


# --- made here -------------------------------------------------------------------------------------------------------


def rows(names: Mapping[str, str], **constants: Any) -> list[dict[str, Any]]:
    """Return the rollouts as rows: column → the writer's name for it, and its other fields."""
    return [{name: TRUE[column][row] for column, name in names.items()} | constants for row in range(2)]


def lines(name: str, content: Sequence[Mapping[str, Any]], *words: str) -> Callable[[Path], Sequence[Path | str]]:
    """Return the writer of a file of JSON lines."""

    def write(folder: Path) -> Sequence[Path | str]:
        text = "".join(json.dumps(row) + "\n" for row in content).encode()
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return folder if not words else folder / name, *words

    return write


def parquet(
    name: str, content: Sequence[Mapping[str, Any]], *words: str, schema: pa.Schema | None = None
) -> Callable[[Path], Sequence[Path | str]]:
    """Return the writer of a Parquet file."""

    def write(folder: Path) -> Sequence[Path | str]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(list(content), schema=schema), folder / name)
        return folder if not words else folder / name, *words

    return write


OWN = {name: name for name in TRUE}
WITHOUT_IDS = {name: name for name in TRUE if name not in ("sample_id", "group_id")}
TOKENS = ("prompt_token_ids", "response_token_ids")
BOTH = (*TOKENS, "rollout_log_probs", "trainer_log_probs")
VERL = {**{name: name for name in (*TOKENS, "rollout_log_probs", "response_mask")}, "advantage": "advantages",
        "trainer_log_probs": "old_log_probs"}  # fmt: skip
TRL = {"prompt_token_ids": "prompt_ids", "response_token_ids": "completion_ids", "advantage": "advantages",
       "rollout_log_probs": "sampling_per_token_logps", "trainer_log_probs": "old_per_token_logps",
       "response_mask": "completion_mask"}  # fmt: skip
OPEN_INSTRUCT = {"prompt_token_ids": "prompt_tokens", "response_token_ids": "response_tokens", "reward": "reward",
                 "advantage": "advantage", "finish_reason": "finish_reason", "data_source": "dataset",
                 "rollout_log_probs": "logprobs"}  # fmt: skip
MINE = {"prompt_token_ids": "p", "response_token_ids": "r", "rollout_log_probs": "mu", "trainer_log_probs": "pi"}
MAPPED = [word for column, name in MINE.items() for word in ("--map", f"{name}={column}")]
ROW = rows(WITHOUT_IDS)


def _two_shards(folder: Path) -> Sequence[Path | str]:
    for shard in range(2):
        pq.write_table(pa.Table.from_pylist(rows(OWN)[shard : shard + 1]), folder / f"step_0003_shard_{shard}.parquet")
    return (folder,)


def _encoded(folder: Path) -> Sequence[Path | str]:
    lists, strings = ("sample_id", *TOKENS), ("group_id", "finish_reason", "data_source")
    columns: dict[str, Any] = {name: values for name, values in TRUE.items() if name not in (*lists, *strings)}
    columns["group_ids"] = TRUE["group_id"]
    batch = RolloutBatch.from_lists(*(TRUE[name] for name in lists), **columns)
    (folder / "step_0001.parquet").write_bytes(encode_rollouts(batch))
    return (folder,)


def _cut(folder: Path) -> Sequence[Path | str]:
    _encoded(folder)
    path = folder / "step_0001.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    return (folder,)


def _csv(folder: Path) -> Sequence[Path | str]:
    (folder / "metrics.csv").write_text("step,reward\n1,0.5\n")
    return (folder / "metrics.csv",)


def _dump(*folders: str) -> Callable[[Path], Sequence[Path | str]]:
    def write(folder: Path) -> Sequence[Path | str]:
        shutil.copytree(DUMPS / Path(*folders), folder / folders[-1])
        return (folder / folders[-1],)

    return write


def _comparison(folder: Path) -> Sequence[Path | str]:
    import torch

    samples = [
        {"sample_index": row, "total_length": len(TRUE["prompt_token_ids"][row] + TRUE["response_token_ids"][row]),
         "response_length": len(TRUE["response_token_ids"][row]), "reward": 0.5, "raw_reward": TRUE["reward"][row],
         "truncated": row, "tokens": TRUE["prompt_token_ids"][row] + TRUE["response_token_ids"][row],
         "response_token_ids": TRUE["response_token_ids"][row], "loss_mask": [1] * len(TRUE["response_mask"][row]),
         "rollout_log_probs": TRUE["rollout_log_probs"][row], "megatron_log_probs": TRUE["trainer_log_probs"][row]}
        for row in range(2)
    ]  # fmt: skip
    torch.save({"rollout_id": 4, "rank": 0, "cp_rank": 0, "tp_rank": 0, "samples": samples}, folder / "4_0.pt")
    return (folder,)


def _of_types(names: Mapping[str, str], token: pa.DataType, number: pa.DataType, make: Any) -> pa.Schema:
    kinds = {"prompt_token_ids": make(token), "response_token_ids": make(token), "response_mask": make(pa.bool_()),
             "rollout_log_probs": make(number), "trainer_log_probs": make(number)}  # fmt: skip
    return pa.schema([(name, kinds.get(column, pa.string() if isinstance(TRUE[column][0], str) else number))
                      for column, name in names.items()])  # fmt: skip


BOOLEANS = [row | {"response_mask": [bool(each) for each in row["response_mask"]]} for row in ROW]
UNEQUAL = [*ROW, ROW[0] | {"rollout_log_probs": [-1.0]}]
IDS = tuple(OWN)
FILES: dict[str, File] = {
    "prime-rl's token export": File(_dump("prime-rl"), BOTH, 16),
    "NeMo-RL's train_data": File(_dump("nemo-rl"), (*BOTH, "reward"), 16),
    "slime's dump details": File(_dump("slime"), (*BOTH, "reward"), 16),
    "slime's rollouts alone": File(_dump("slime", "rollout_data"), (*TOKENS, "rollout_log_probs", "reward"), 16,
                                   ("trainer log-probs",)),
    "miles' dump details": File(_dump("miles"), (*BOTH, "reward"), 16),
    "miles' log-prob comparison": File(_comparison, (*BOTH, "reward")),
    "SkyRL's training input": File(_dump("skyrl"), BOTH, 16),
    "Foreshock's own Parquet": File(_encoded, (*BOTH, "sample_id", "group_id", "response_mask", "reward")),
    "JSON lines with every column": File(lines("step_0001.jsonl", rows(OWN)), IDS),
    "gzipped JSON lines": File(lines("step_0001.jsonl.gz", rows(OWN)), IDS),
    "JSON lines without ids": File(lines("step_0001.jsonl", ROW), tuple(WITHOUT_IDS)),
    "JSON lines with other keys": File(lines("step_0001.jsonl", rows(OWN, colour="red")), IDS, other=("colour",)),
    "Parquet with every column": File(parquet("step_0001.parquet", rows(OWN)), IDS),
    "Parquet without sample ids": File(parquet("step_0001.parquet", ROW), tuple(WITHOUT_IDS)),
    "Parquet with other columns": File(parquet("step_0001.parquet", rows(OWN, colour="red")), IDS, other=("colour",)),
    "Parquet of large lists of float64 and int64": File(
        parquet("step_0001.parquet", BOOLEANS, schema=_of_types(WITHOUT_IDS, pa.int64(), pa.float64(), pa.large_list)),
        tuple(WITHOUT_IDS),
    ),
    "Parquet of float16": File(
        parquet("step_0001.parquet", BOOLEANS, schema=_of_types(WITHOUT_IDS, pa.int32(), pa.float16(), pa.list_)),
        tuple(WITHOUT_IDS),
    ),
    "two shards": File(_two_shards, IDS),
    "step elsewhere in the name": File(parquet("rollouts-step=12.parquet", ROW), tuple(WITHOUT_IDS)),
    "step in a column": File(parquet("all.parquet", rows(WITHOUT_IDS, step=7)), tuple(WITHOUT_IDS)),
    "two steps in one file": File(
        parquet("all.parquet", [row | {"step": step} for step, row in enumerate(ROW)]), tuple(WITHOUT_IDS)
    ),
    "step as an option": File(lines("mine.jsonl", ROW, "--step", "3"), tuple(WITHOUT_IDS)),
    "names of my own": File(lines("mine.jsonl", rows(MINE, it=4), *MAPPED, "--map", "it=step"), BOTH),
    "verl's names": File(lines("step_0001.jsonl", rows(VERL)), (*BOTH, "advantage"), other=("old_log_probs",)),
    "TRL's names, beside texts": File(
        parquet("step_0001.parquet", rows(TRL, prompt="a", completion="b")), (*BOTH, "advantage", "response_mask"),
        other=("completion",),
    ),
    "open-instruct's save_traces": File(
        lines("run_rollouts_000000.jsonl", [
            row | {"step": 5, "sample_idx": number, "prompt_idx": 0, "ground_truth": None, "request_info": None}
            for number, row in enumerate(rows(OPEN_INSTRUCT))
        ]), (*TOKENS, "rollout_log_probs", "reward", "advantage", "finish_reason", "data_source"),
        other=("ground_truth", "request_info", "sample_idx"),
    ),
    "lists of other lengths": File(lines("step_0001.jsonl", UNEQUAL), tuple(WITHOUT_IDS), other=("1 of 3 rollouts",)),
    "verl's rollout_data_dir": File(
        lines("1.jsonl", [{"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 1}]),
        says="calculate_log_probs=True"),
    "TRL's completions": File(
        parquet("completions/completions_00001.parquet", [{"step": 1, "prompt": "a", "completion": "b"}]),
        says="ForeshockCallback"),
    "ms-swift's completions": File(
        lines("completions.jsonl", [{"gen_step": 1, "prompt": ["a"], "completion": ["b"], "advantages": [0.5]}]),
        says="ForeshockCallback"),
    "AReaL's trajectories": File(
        lines("7/task.jsonl", [{"task_id": "t", "sample_idx": 0, "seqlen": 9, "prompt_len": 4, "head_version": 6,
                                "tail_version": 7, "reward": 1.0, "prompt": "a", "completion": "b"}]),
        says="have no log-probs: log them by"),
    "ROLL's rollout dump": File(
        lines("rollout_dump_data.step_3.jsonl", [{"global_step": [3], "id": ["a"], "responses": ["b"], "scores": [1.0],
                                                  "sampling_params": ["{}"]}]), says="log its batches by"),
    "tinker's rollout summaries": File(
        lines("iteration_000003/train_rollout_summaries.jsonl", [
            {"schema_version": 1, "split": "train", "iteration": 3, "group_idx": 0, "traj_idx": 0, "tags": [],
             "total_reward": 1.0, "final_reward": 1.0, "steps": [{"ob_len": 4, "ac_len": 5}], "final_ob_len": 9}]),
        says="have no log-probs: log them by"),
    "SkyRL's evaluations": File(
        lines("gsm8k.jsonl", [{"input_prompt": "a", "output_response": "b", "score": 1.0, "stop_reason": "stop"}]),
        says="dump_data_batch"),
    "Agent-Lightning's trajectories": File(
        lines("train_trajectories.jsonl", [{"rollout_id": "a", "reward": 1.0, "prompt": "b", "response": "c"}]),
        says="FORESHOCK_URL"),
    "torchtitan's recorder": File(
        lines("rollout_samples.jsonl", [{"is_validation": False, "group_id": 1, "reward": 1.0, "reward_breakdown": {},
                                         "turns": [{"min_policy_version": 1}]}]), says="log them"),
    "probabilities for log-probs": File(
        lines("step_0001.jsonl", [row | {"rollout_log_probs": [0.5] * len(row["rollout_log_probs"])} for row in ROW]),
        says="log natural-log probabilities"),
    "texts of another writer": File(
        lines("step_0001.jsonl", [{"question": "a", "answer": "b"}]), says="--map NAME=prompt_token_ids"),
    "two steps under the name of one": File(
        lines("step_0001.jsonl", [ROW[0] | {"step": 1}, ROW[1] | {"step": 2}]), says="in a file of step 1"),
    "a Parquet file that is cut off": File(_cut, says="is empty or cut off"),
    "a table of metrics": File(_csv, says="foreshock backtest"),
}  # fmt: skip


def run() -> list[Line]:
    """Print the outcome of each file, and return their counts."""
    counts = dict.fromkeys(("read", "refused", "silent", "wrong"), 0)
    for name, file in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            found, sentence = outcome(file, Path(folder))
        counts[found] += 1
        print(f"{found:8} {name}{f': {sentence}' if sentence else ''}", flush=True)
    return [
        Line("files", "files in public layouts", len(FILES), 30, at_least=True),
        Line("files_read", "… read", counts["read"]),
        Line("files_refused", "… refused with what to do", counts["refused"]),
        Line("files_silent", "… silent", counts["silent"], 0),
        Line("files_wrong", "… wrong", counts["wrong"], 0),
    ]
