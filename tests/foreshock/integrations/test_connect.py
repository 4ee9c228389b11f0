"""Frameworks that `connect` observes: their released code, and the shapes of their batches."""

import json
import logging
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto

from foreshock.client.reporting import LogOnce
from foreshock.errors import ConfigurationError
from foreshock.integrations.batches import columns_of_batch
from foreshock.integrations.connect import KINDS, connect
from scripts.frameworks_page import FRAMEWORKS, PAGE, page
from scripts.releases import RELEASES
from tests.foreshock.importers.make_dumps import DUMPS
from tests.foreshock.importers.reading import recorded
from tests.foreshock.integrations.connected_runs import (
    MU,
    PI,
    RATE,
    RESPONSES,
    SAMPLED,
    SCALE,
    padded,
    rows_of,
    sequences,
)
from tests.foreshock.integrations.test_releases import SOURCES

TOKENS = {"prompt_token_ids": [[1, 2], [1, 2]], "response_token_ids": RESPONSES, "response_mask": SAMPLED}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
DECLARED: dict[str, dict[str, Any]] = {
    "tinker-cookbook": {"temperature": 1.0, "length_cap": 8, "trainer_weights_version": 7},
    "areal": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "length_cap": 8, "trainer_weights_version": 7, **CLIP},
    "skyrl": {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "length_cap": 8,
              "trainer_weights_version": 6, "loss_aggregation": "token_mean", **CLIP},
    "openrlhf": {},
}  # fmt: skip
LAST_STEPS = {"tinker-cookbook": 8, "areal": 7, "skyrl": 7, "openrlhf": None}
LOG_PROBS = {"rollout_log_probs": MU, "trainer_log_probs": PI}


def told(framework: str, *folders: str) -> dict[str, Any]:
    """Return what arrived of a run of released code."""
    paths = [SOURCES / "whole" / name for name in (framework, *folders)]
    if not all(path.exists() for path in paths) and not os.environ.get("CI"):
        pytest.skip(f"no {paths[0]}; run python -m scripts.release_sources {SOURCES}")
    command = [sys.executable, "-m", "tests.foreshock.integrations.connected_runs", framework, *map(str, paths)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "folders", "obeys"),
    [("tinker-cookbook", ("tinker", "chz"), True), ("areal", (), True), ("skyrl", (), True), ("openrlhf", (), False)],
)
def test_released_code_is_logged_and_obeys(framework: str, folders: tuple[str, ...], obeys: bool) -> None:
    found = told(framework, *folders)
    ((step, attributes, columns),) = found["rollouts"]
    assert step == 7
    assert attributes == {"trainer_policy": "recomputed_old", **DECLARED[framework]}
    expectations: dict[str, Any] = {**TOKENS, **LOG_PROBS}
    for name, rows in expectations.items():
        for row, expected in zip(columns[name], rows, strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-6)
    assert found["described"]["model"] == "m"
    assert found["described"]["initial_learning_rate"] == RATE
    ((step, metrics),) = found["metrics"]
    assert step == 7
    assert metrics.get("planned_last_step") == LAST_STEPS[framework]
    if obeys:
        assert found["rate"] == pytest.approx(RATE * SCALE)
        assert found["acknowledged"] == [[pytest.approx(7, abs=1), pytest.approx(RATE * SCALE), SCALE]]
    if framework == "tinker-cookbook":
        d = np.concatenate([np.subtract(pi, mu)[np.array(mask) == 1]
                            for pi, mu, mask in zip(PI, MU, SAMPLED, strict=True)])  # fmt: skip
        assert found["own"]["optim/kl_sample_train_v1"] == pytest.approx(-d.mean(), abs=1e-6)
    if obeys:
        lever, _, done, refused = found["reported"]
        assert (lever, done) == ("correction", "token_tis" if framework == "areal" else None)
        assert (refused is None) is (framework == "areal")
    if framework == "skyrl":
        assert "off_policy_correction.tis_ratio_type=token and token_tis_ratio_clip_high=2" in found["reported"][3]
    if framework == "areal":
        # What its own loss takes in this update.
        assert found["sampling"] == ["token", "clamp", "ratio", 2.0]
        assert [row[0] for row in columns["weights_version"]] == [5, 5]
    if framework in ("tinker-cookbook", "skyrl"):
        assert columns["weights_version"] == [[attributes["trainer_weights_version"]] * len(row) for row in MU]


def nemo_rl() -> dict[str, Any]:
    lines = [json.loads(line) for line in (DUMPS / "nemo-rl" / "train_data_step45.jsonl").read_text().splitlines()]
    names = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs", "advantages", "input_lengths",
             "rewards")  # fmt: skip
    return {name: [line[name][0] if isinstance(line[name], list) else line[name] for line in lines] for name in names}


def test_nemo_rls_log_data_are_its_rollouts() -> None:
    found = columns_of_batch(nemo_rl(), "nemo-rl", LogOnce("foreshock.tests"))
    assert found is not None
    columns = rows_of(found)
    for number, row in enumerate(recorded(45)):
        assert columns["response_token_ids"][number] == row["response"]
        assert columns["response_mask"][number] == row["mask"]
        np.testing.assert_allclose(columns["rollout_log_probs"][number], row["mu"], atol=1e-6)
        np.testing.assert_allclose(columns["trainer_log_probs"][number], row["pi"], atol=1e-6)


def roll(**changed: Any) -> dict[str, Any]:
    """Return a batch of ROLL: columns of log-probs begin at the second token."""
    tokens, attention = sequences(7)
    return {"input_ids": tokens, "attention_mask": attention, "response_mask": padded(SAMPLED, 7, left=2),
            "infer_logprobs": padded(MU, 6, left=1), "old_log_probs": padded(PI, 6, left=1), **changed}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_read(kind: torch.dtype) -> None:
    columns = columns_of_batch(roll(infer_logprobs=padded(MU, 6, left=1).to(kind)), "roll", LogOnce("foreshock.tests"))
    assert columns is not None
    found = rows_of(columns)
    assert {name: found[name] for name in (*TOKENS, *LOG_PROBS)} == {**TOKENS, **LOG_PROBS}


@pytest.mark.parametrize(
    ("changed", "sentence", "missing"),
    [
        ({"infer_logprobs": padded(MU, 9)}, "rollout_log_probs", "infer_logprobs has [2, 9] and the responses"),
        ({"old_log_probs": torch.zeros(2, 6)}, "trainer_log_probs", "`old_log_probs` is 0 at every token"),
        ({"response_mask": None}, None, "no mask of the batch tells which tokens are responses"),
        ({"input_ids": None}, None, "the batch has none of input_ids, sequences, token_ids as a matrix"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(
    changed: dict[str, Any], sentence: str | None, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    columns = columns_of_batch(roll(**changed), "roll", LogOnce("foreshock.tests"))
    assert (columns is None) == (sentence is None)
    assert columns is None or sentence not in columns
    assert missing in caplog.text


def test_not_finite_values_are_kept_for_the_counts() -> None:
    columns = columns_of_batch(roll(infer_logprobs=padded([[float("nan"), 0, -1.0], MU[1]], 6, left=1)), "roll",
                               LogOnce("foreshock.tests"))  # fmt: skip
    assert columns is not None
    assert np.isnan(rows_of(columns)["rollout_log_probs"][0][0])


def test_verls_data_proto_is_read() -> None:
    """Prompts are padded on the left, responses on the right; scores are of tokens."""
    values = {
        "prompts": torch.tensor([[0, 5], [6, 7]]),
        "responses": torch.tensor([[10, 11, 12], [20, 21, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 1, 0]]),
        "rollout_log_probs": torch.tensor([[-1.0, 0.0, -2.0], [-3.0, -4.0, 0.0]]),
        "old_log_probs": torch.tensor([[-1.5, 0.0, -2.0], [-3.0, -4.5, 0.0]]),
        "advantages": torch.tensor([[0.5, 0.5, 0.5], [-0.5, -0.5, 0.0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    }
    data = DataProto.from_dict(values, non_tensors={"uid": np.array(["a", "a"], dtype=object)})
    columns = columns_of_batch(data, "verl", LogOnce("foreshock.tests"))
    assert columns is not None
    assert rows_of(columns) == {
        "prompt_token_ids": [[5], [6, 7]], "response_token_ids": [[10, 11, 12], [20, 21]],
        "response_mask": [[1, 0, 1], [1, 1]], "rollout_log_probs": [[-1, 0, -2], [-3, -4]],
        "trainer_log_probs": [[-1.5, 0, -2], [-3, -4.5]], "advantage": [[0.5, 0, 0.5], [-0.5, -0.5]],
        "reward": [1, 0], "group_id": ["a", "a"],
    }  # fmt: skip


def test_batches_of_a_list_are_joined() -> None:
    wider = {name: torch.nn.functional.pad(values, (0, 2)) for name, values in roll().items()}
    columns = columns_of_batch([roll(), wider], "roll", LogOnce("foreshock.tests"))
    assert columns is not None
    found = rows_of(columns)
    assert (found["response_token_ids"], found["rollout_log_probs"]) == (RESPONSES * 2, MU * 2)
    assert len(set(columns["group_id"])) == 1


def test_unknown_trainer_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"is of no known framework: tinker-cookbook \("):
        connect(logging)


def test_every_row_has_its_releases_and_few_lines() -> None:
    assert {framework for framework, _ in KINDS.values()} <= RELEASES.keys()
    for row in FRAMEWORKS:
        assert row.key in RELEASES
        assert 1 <= len(row.lines) <= 5
    tried = [row.tried for row in FRAMEWORKS]
    assert len(FRAMEWORKS) >= 14
    assert sum(each != "read" for each in tried) >= 8
    assert sum("rate" in row.obeys for row in FRAMEWORKS) >= 10
    assert sum("correction" in row.obeys for row in FRAMEWORKS) >= 3
    assert PAGE.read_text() == page(), "run python -m scripts.frameworks_page"
