"""Dumps written by the frameworks' own writers are read as the rollouts that they were written from."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.connect.files import FILES, outcome
from foreshock.errors import ConfigurationError
from foreshock.importers import FORMATS, ReadOptions, find_dumps, formats_of
from foreshock.rollouts import RolloutBatch
from tests.foreshock.importers.make_dumps import DUMPS, STEPS, lists, rollouts_of
from tests.foreshock.importers.reading import FOLDERS, figures, measures, read, recorded, rows_of


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_rollouts_are_those_that_were_written(folder: str, step: int) -> None:
    batch = RolloutBatch.concat(read(folder, step).batches)
    assert rows_of(batch) == recorded(step)
    assert batch.attributes.trainer_policy == ("current" if folder == "prime-rl" else "recomputed_old")
    # Two prompts with four rollouts each.
    assert batch.group_ids is not None
    assert [batch.group_ids.index(group) for group in batch.group_ids] == [0] * 4 + [4] * 4
    expected = [row["advantage"] for row in lists(rollouts_of(step)) for _ in row["response"]]
    assert batch.advantage is not None
    assert np.asarray(batch.advantage).tolist() == expected


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("folder", ["nemo-rl", "slime", "miles"])
def test_rewards_are_those_before_normalisation(folder: str, step: int) -> None:
    (batch,) = read(folder, step).batches
    assert batch.reward is not None
    assert batch.reward.tolist() == [row["reward"] for row in lists(rollouts_of(step))]


@pytest.mark.parametrize("step", STEPS)
def test_k3_equals_the_figure_of_prime_rl(step: int) -> None:
    imported = read("prime-rl", step)
    own = figures("prime-rl", step)["mismatch_kl/all/mean"]
    assert measures(imported)["k3_kl"] == pytest.approx(own, abs=1e-6, rel=0)
    # The rest is float32: exp(d) − d − 1 of k3 = 1e-5 is off by some 1e-8 per token.
    assert measures(imported)["k3_kl"] == pytest.approx(own, rel=1e-3)
    assert imported.scalars["mismatch_kl/all/mean"] == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_k3_and_ratios_equal_the_figures_of_nemo_rl(step: int) -> None:
    measured, own = measures(read("nemo-rl", step)), figures("nemo-rl", step)
    assert measured["k3_kl"] == pytest.approx(own["gen_kl_error"], abs=1e-6, rel=0)
    assert measured["k3_kl"] == pytest.approx(own["gen_kl_error"], rel=1e-3)
    assert measured["token_mult_prob_error"] == pytest.approx(own["token_mult_prob_error"], abs=1e-6, rel=0)


@pytest.mark.parametrize("step", STEPS)
def test_differences_equal_the_figure_of_skyrl(step: int) -> None:
    batch = RolloutBatch.concat(read("skyrl", step).batches)
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    differences = np.abs(np.float64(batch.rollout_log_probs) - batch.trainer_log_probs)[batch.generated]
    own = figures("skyrl", step)["policy/rollout_train_logprobs_abs_diff_mean"]
    assert differences.mean() == pytest.approx(own, abs=1e-6, rel=0)


def test_a_kl_to_the_reference_model_is_a_scalar_only() -> None:
    imported = read("skyrl", 45)
    assert imported.scalars["avg_kl"] == pytest.approx(0.7)
    assert measures(imported)["k3_kl"] < 1e-4


def test_rows_that_fill_a_batch_of_skyrl_are_dropped() -> None:
    (batch,) = read("skyrl", 1).batches
    assert batch.num_rollouts == 8  # of 9 in the file


def test_ranks_with_the_same_samples_are_read_once() -> None:
    imported = read("miles", 45)
    assert imported.batches[0].num_rollouts == 8
    assert any("read once" in note for note in imported.notes)


def test_rollout_dumps_alone_have_no_trainer_log_probs() -> None:
    (dump,) = [dump for dump in find_dumps("slime", DUMPS / "slime" / "rollout_data") if dump.step == 45]
    imported = FORMATS["slime"].read(dump, ReadOptions(allow_pickle=True))
    assert imported.batches[0].trainer_log_probs is None
    assert any("--save-debug-train-data" in note for note in imported.notes)
    assert imported.batches[0].weights_version is not None
    assert set(imported.batches[0].weights_version.tolist()) == {45}
    assert imported.batches[0].finish_reasons == ["stop"] * 8


def test_rollouts_of_several_weights_versions_are_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sample = {"tokens": [5, 6, 7], "response_length": 2, "rollout_log_probs": [-0.5, -1.0]}
    samples = [{**sample, "weight_versions": versions} for versions in (["3"], ["3", "4"])]
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "3.pt")
    (dump,) = find_dumps("slime", tmp_path)
    notes = FORMATS["slime"].read(dump, ReadOptions(allow_pickle=True)).notes
    assert sum("several versions of the weights" in note for note in notes) == 1


def test_training_dumps_alone_have_rewards_and_groups() -> None:
    (dump,) = [dump for dump in find_dumps("slime", DUMPS / "slime" / "train_data") if dump.step == 45]
    (batch,) = FORMATS["slime"].read(dump, ReadOptions(allow_pickle=True)).batches
    assert batch.reward is not None
    assert batch.reward.tolist() == [row["reward"] for row in lists(rollouts_of(45))]
    assert batch.group_ids is not None
    assert len(set(batch.group_ids)) == 2


def test_comparison_of_miles_has_both_log_probs(tmp_path: Path) -> None:
    """The file of `save_logprob_comparison_data`; its `reward` is the one after normalisation."""
    torch = pytest.importorskip("torch")
    tokens, response = [5, 6, 7, 8, 9], [7, 8, 9]
    sample = {
        "sample_index": 3, "reward": -0.7, "raw_reward": 1.0, "total_length": 5, "response_length": 3, "tokens": tokens,
        "response_token_ids": response, "response_token_texts": None, "response_text": None, "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, -1.0, -1.5], "megatron_log_probs": [-0.25, -1.0, -1.75],
        "abs_diff": [0.25, 0.0, 0.25], "content_abs_diff_mean": 0.25, "content_abs_diff_max": 0.25,
    }  # fmt: skip
    # miles cuts a response whose columns differ in length, but not `tokens`.
    cut = {**sample, "sample_index": 4, "response_length": 2, "response_token_ids": [7, 8], "loss_mask": [1, 0],
           "rollout_log_probs": [-0.5, -1.0], "megatron_log_probs": [-0.25, -1.0]}  # fmt: skip
    ranks = {"rank": 0, "dp_rank": 0, "cp_rank": 0, "tp_rank": 0}
    torch.save({"rollout_id": 45, **ranks, "samples": [sample, cut]}, tmp_path / "45_0.pt")
    (dump,) = find_dumps("slime", tmp_path)
    imported = FORMATS["slime"].read(dump, ReadOptions(allow_pickle=True))
    (batch,) = imported.batches
    assert batch.response_token_ids.tolist() == response
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    assert batch.reward is not None
    assert batch.response_mask is not None
    # Log-probs of tool output, which the mask leaves out, are not kept.
    assert batch.trainer_log_probs.tolist() == [-0.25, 0.0, -1.75]
    assert batch.rollout_log_probs.tolist() == [-0.5, 0.0, -1.5]
    assert (batch.reward.tolist(), batch.response_mask.tolist()) == ([1.0], [1, 0, 1])
    assert batch.attributes.trainer_policy == "recomputed_old"
    assert [count for count, _ in imported.left_out] == [1]
    assert "response_token_ids" in imported.left_out[0][1]


def test_prime_rl_tokens_of_another_model_are_not_measured(tmp_path: Path) -> None:
    file = DUMPS / "prime-rl" / "token_exports" / "step_45" / "rank_0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["rl_weights"] = [0.0 if place % 2 else 1.0 for place in range(len(line["token_ids"]))]
    folder = tmp_path / "token_exports" / "step_45"
    folder.mkdir(parents=True)
    (folder / "rank_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (dump,) = find_dumps("prime-rl", tmp_path)
    (batch,) = FORMATS["prime-rl"].read(dump, ReadOptions()).batches
    trained = sum(sum(line["loss_mask"]) for line in lines)
    assert 0 < batch.generated.sum() < trained


def test_zeros_in_place_of_trainer_log_probs_are_left_out(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (DUMPS / "nemo-rl" / "train_data_step45.jsonl").read_text().splitlines()]
    for line in lines:
        line["prev_logprobs"] = [[0.0] * len(line["prev_logprobs"][0])]
    (tmp_path / "train_data_step45.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (dump,) = find_dumps("nemo-rl", tmp_path)
    imported = FORMATS["nemo-rl"].read(dump, ReadOptions())
    assert imported.batches[0].trainer_log_probs is None
    assert any("force_on_policy_ratio" in note for note in imported.notes)


@pytest.mark.parametrize(("folder", "name"), FOLDERS.items())
def test_format_is_told_from_the_files(folder: str, name: str) -> None:
    assert formats_of(DUMPS / folder) == [name]


def test_no_dumps_name_the_layout_and_the_other_format() -> None:
    with pytest.raises(ConfigurationError, match=r"train_data_stepN\.jsonl; the files look like --format prime-rl"):
        find_dumps("nemo-rl", DUMPS / "prime-rl")


def test_exports_of_several_runs_are_refused(tmp_path: Path) -> None:
    for run in ("a", "b"):
        folder = tmp_path / run / "token_exports" / "step_1"
        folder.mkdir(parents=True)
        (folder / "rank_0.jsonl").write_text("{}\n")
    with pytest.raises(ConfigurationError, match="several runs"):
        find_dumps("prime-rl", tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    found, sentence = outcome(FILES[name], tmp_path)
    assert found == ("read" if FILES[name].columns else "refused"), sentence
