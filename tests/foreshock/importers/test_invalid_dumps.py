"""An invalid dump gives one error with file, line and field; a damaged one never crashes the importer."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.commands.main import main
from foreshock.errors import ForeshockError, RolloutsError
from foreshock.importers import FORMATS, ReadOptions, find_dumps
from foreshock.importers.rows import Row, log_probs_of
from foreshock.importers.texts import lacks_tokens
from foreshock.rollouts.schema import DecodeLimits
from tests.foreshock.importers.make_dumps import DUMPS

Line = dict[str, Any]


def copied(folder: str, tmp_path: Path) -> Path:
    target = tmp_path / folder
    shutil.copytree(DUMPS / folder, target)
    return target


def read(name: str, path: Path, options: ReadOptions | None = None) -> Any:
    dump = find_dumps(name, path)[0]
    return FORMATS[name].read(dump, options or ReadOptions())


def edited(path: Path, edit: Callable[[Line], Any], line: int = 2) -> None:
    """Change one line of a file of JSON lines."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    edit(lines[line - 1])
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


PRIME_RL = {
    "no token ids": (lambda line: line.pop("token_ids"), "line 2, field `token_ids`: is missing; the line has"),
    "text for a list": (lambda line: line.update(token_ids="12"), "`token_ids`: expected a list, got str '12'"),
    "text in a list": (
        lambda line: line["inference_logprobs"].__setitem__(3, "-0.5"),
        "`inference_logprobs`: expected a list of numbers, got list",
    ),
    "number for an id": (lambda line: line["token_ids"].__setitem__(0, 1.5), "expected a list of whole numbers"),
    "negative id": (
        lambda line: line["token_ids"].__setitem__(-1, -4),
        "line 2, field `response_token_ids`: -4 at token",
    ),
    "one value too few": (
        lambda line: line["trainer_logprobs"].pop(),
        "`trainer_logprobs`: expected [0-9]+ values, one per",
    ),
    "two in a mask": (lambda line: line["loss_mask"].__setitem__(0, 2), "`loss_mask`: expected a list of 0 and 1"),
    "nested": (lambda line: line.update(entropy=[[0.1]]), "`entropy`: expected a flat list of numbers"),
    "ragged": (lambda line: line.update(entropy=[[0.1], 2]), "`entropy`: expected a flat list of numbers"),
    "other step": (lambda line: line.update(step=9), "`step`: is 9 in the folder of step 1"),
    "nothing trained": (lambda line: line.update(loss_mask=[0] * len(line["token_ids"])), "has no trained token"),
    "name is a number": (lambda line: line.update(env_name=3), "`env_name`: expected a string or null, got int"),
    "positive log-prob": (
        lambda line: line["trainer_logprobs"].__setitem__(-1, 0.25),
        "line 2, field `trainer_logprobs`: 0.25 at token [0-9]+ is above 0; expected natural log-probs",
    ),
}


NEMO_RL = {
    "length beyond the tokens": (lambda line: line.update(input_lengths=[999]), "`input_lengths`: expected 1 to"),
    "length is a text": (lambda line: line.update(input_lengths=["9"]), "`input_lengths`: expected a number or null"),
    "mask in the padding": (
        lambda line: (line.update(input_lengths=[3]), line["token_loss_mask"][0].__setitem__(-1, 1)),
        "`token_loss_mask`: is 1 in the padding",
    ),
    "text for a reward": (lambda line: line.update(rewards=["good"]), "`rewards`: expected a number or null, got str"),
    "huge id": (
        lambda line: line["token_ids"][0].__setitem__(-1, 1 << 70),
        "`token_ids`: expected a list of whole numbers",
    ),
}


CASES = [("prime-rl", "token_exports/step_1/rank_0.jsonl", *case) for case in PRIME_RL.values()]
CASES += [("nemo-rl", "train_data_step1.jsonl", *case) for case in NEMO_RL.values()]


@pytest.mark.parametrize(("name", "file", "edit", "message"), CASES, ids=[*PRIME_RL, *NEMO_RL])
def test_invalid_line_names_file_line_and_field(
    tmp_path: Path, name: str, file: str, edit: Callable[[Line], Any], message: str
) -> None:
    folder = copied(name, tmp_path)
    edited(folder / file, edit)
    with pytest.raises(RolloutsError, match=message) as caught:
        read(name, folder)
    assert f"{Path(file).name}, line 2" in str(caught.value)


TEXTS = {
    b"": "is empty: expected one JSON object per line",
    b"\n\n": "is empty",
    b"{}": "field `token_ids`: is missing",
    b'{"token_ids": [1, 2': "line 1: the line is cut off",
    b"[1]\n": "line 1: expected a JSON object, got list",
    b"nonsense\n": "line 1: expected a JSON object, got Expecting value",
    b"\xff\xfe{}\n": "line 1: expected a JSON object",
    b"[" * 100_000 + b"\n": "line 1: expected a JSON object",
}


@pytest.mark.parametrize("content", TEXTS)
@pytest.mark.parametrize("name", ["prime-rl", "nemo-rl"])
def test_content_that_is_no_json_names_the_line(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / {"prime-rl": "step_1/rank_0.jsonl", "nemo-rl": "train_data_step1.jsonl"}[name]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(RolloutsError, match=TEXTS[content]):
        read(name, path.parent)


def test_file_beyond_the_limits_is_refused() -> None:
    with pytest.raises(RolloutsError, match="has more than 1,000 bytes"):
        read("nemo-rl", DUMPS / "nemo-rl", ReadOptions(limits=DecodeLimits(max_uncompressed_bytes=1000)))
    with pytest.raises(RolloutsError, match="has more than 3 rollouts"):
        read("nemo-rl", DUMPS / "nemo-rl", ReadOptions(limits=DecodeLimits(max_rollouts=3)))


def test_step_in_the_name_must_be_that_of_the_file(tmp_path: Path) -> None:
    shutil.copy(DUMPS / "slime" / "rollout_data" / "45.pt", tmp_path / "rollout_7.pt")
    with pytest.raises(RolloutsError, match=r"rollout_7\.pt has rollout_id 45, but its name says 7"):
        read("slime", tmp_path, ReadOptions(allow_pickle=True))


def test_folders_of_different_runs_are_not_joined(tmp_path: Path) -> None:
    folder = copied("slime", tmp_path)
    shutil.copy(DUMPS / "miles" / "rollout_data" / "45.pt", folder / "rollout_data" / "45.pt")
    (step,) = [dump for dump in find_dumps("slime", folder) if dump.step == 45]
    assert FORMATS["slime"].read(step, ReadOptions(allow_pickle=True)).batches
    import torch

    content = torch.load(folder / "rollout_data" / "45.pt", weights_only=True)
    content["samples"][3]["tokens"][0] += 1
    torch.save(content, folder / "rollout_data" / "45.pt")
    with pytest.raises(RolloutsError, match="sample 3 have other tokens: the folders are of different runs"):
        FORMATS["slime"].read(step, ReadOptions(allow_pickle=True))


def test_rollout_of_a_wrong_length_is_left_out_and_counted(tmp_path: Path) -> None:
    import torch

    folder = copied("slime", tmp_path)
    content = torch.load(folder / "rollout_data" / "45.pt", weights_only=True)
    content["samples"][1]["rollout_log_probs"].pop()
    torch.save(content, folder / "rollout_data" / "45.pt")
    (step,) = [dump for dump in find_dumps("slime", folder) if dump.step == 45]
    imported = FORMATS["slime"].read(step, ReadOptions(allow_pickle=True))
    count = len(content["samples"])
    assert imported.batches[0].num_rollouts == count - 1
    ((number, note),) = imported.left_out
    assert number == 1
    rule = "since the lists of a rollout must have equal lengths"
    assert note.startswith(f"left out 1 of {count} rollouts, {rule}: 45.pt, sample 1")


@pytest.mark.parametrize("words", [["import", "--run-key", "texts"], ["selfcheck"]])
def test_dumps_of_texts_are_refused_with_what_is_needed(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    verl, trl = tmp_path / "verl", tmp_path / "trl"
    verl.mkdir()
    (verl / "3.jsonl").write_text(json.dumps({"input": "a", "output": "b", "gts": None, "score": 1.0}) + "\n")
    (trl / "completions").mkdir(parents=True)
    columns = {"step": [1], "prompt": ["a"], "completion": ["b"], "reward": [0.5]}
    pq.write_table(pa.table(columns), trl / "completions" / "completions_00001.parquet")
    for folder, needed in ((verl, "calculate_log_probs=True"), (trl, "ForeshockCallback")):
        assert main([*words, str(folder)]) != 0
        error = capsys.readouterr().err
        assert "token ids and log-probs of each token are needed" in error
        assert needed in error
    (verl / "3.jsonl").write_text('{"prompt_token_ids": [1], "response_token_ids": [2]}\n')
    assert lacks_tokens(verl) is None


def mutated(content: bytes, seed: int) -> bytes:
    source = random.Random(seed)
    damaged = bytearray(content)
    for _ in range(source.choice([1, 1, 3, 20])):
        where = source.randrange(len(damaged))
        kind = source.randrange(4)
        if kind == 0:
            damaged[where] = source.randrange(256)
        elif kind == 1:
            del damaged[where : where + source.randrange(1, 200)]
        elif kind == 2:
            damaged[where:where] = damaged[: source.randrange(200)]
        else:
            damaged[where : where + 1] = source.choice(
                [b"null", b"[", b"{}", b"-", b"1e999", b'"', b"NaN", b"true", b"\n"]
            )
        damaged = damaged or bytearray(b"\n")
    return bytes(damaged)


FUZZED = {
    "prime-rl": ("prime-rl/token_exports/step_1/rank_0.jsonl", "step_1/rank_0.jsonl"),
    "nemo-rl": ("nemo-rl/train_data_step1.jsonl", "train_data_step1.jsonl"),
}


@pytest.mark.parametrize("name", FUZZED)
def test_damaged_files_give_an_error_of_foreshock_or_rollouts(tmp_path: Path, name: str) -> None:
    content = (DUMPS / FUZZED[name][0]).read_bytes()
    path = tmp_path / "dumps" / FUZZED[name][1]
    path.parent.mkdir(parents=True)
    errors = []
    for seed in range(400):
        path.write_bytes(mutated(content, seed))
        try:
            read(name, path.parent)
        except ForeshockError as error:
            errors.append(str(error))
    assert 100 < len(errors) < 400
    assert not [error for error in errors if "\n" in error]


def log_probs(values: list[float], sampled: list[bool] | None = None) -> tuple[list[Any] | None, list[str]]:
    """Return the log-probs of a rollout, after one that was not sampled by the model."""
    prompt, masks = np.zeros(1, np.int64), [[False], sampled or [True] * len(values)]
    rows = [
        Row(f"line {line}", str(line), prompt, np.zeros(len(mask), np.int64), np.array(mask), {"x": np.array(column)})
        for line, mask, column in zip((1, 2), masks, ([0.7], values), strict=True)
    ]
    found, notes = log_probs_of(rows, "x", "x")
    return None if found is None else found[1].tolist(), notes


def test_values_at_tokens_that_were_not_sampled_do_not_count() -> None:
    assert log_probs([0.7, -0.1], [False, True])[0] == [0.0, np.float32(-0.1)]


def test_value_above_0_is_named_with_its_place() -> None:
    with pytest.raises(RolloutsError, match=r"line 2, field `x`: 0\.25 at token 1 is above 0"):
        log_probs([-0.1, 0.25])


def test_minus_9999_is_minus_infinity() -> None:
    converted, notes = log_probs([-9999.0, -0.5])
    assert converted == [-np.inf, -0.5]
    assert "1 values of −9999 stand for −inf" in notes[0]


def test_clamped_values_are_reported() -> None:
    values = [-20.0, -20.0, -0.5, -20.0]
    assert "3 values are exactly -20" in log_probs(values)[1][0]
    assert log_probs([value * 1.01 for value in values])[1] == []


def test_all_zero_is_a_placeholder() -> None:
    found, (note,) = log_probs([0.0, 0.0, 0.0])
    assert found is None
    assert "placeholder" in note
    assert log_probs([0.0, -1e-9])[0] is not None
    assert log_probs([0.0, 0.0], [False, False]) == (None, [])
