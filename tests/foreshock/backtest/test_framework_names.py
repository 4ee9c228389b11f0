"""The names that frameworks log are read as their quantities; the rest is reported, a run of nothing else refused."""

import json
from pathlib import Path

import pytest

from foreshock.backtest.readers import UnreadableRun, read_record
from foreshock.commands.main import main
from foreshock.diagnosis.quantities import (
    ENTROPY_KEY,
    GRADIENT_NORM_KEY,
    LEARNING_RATE_KEY,
    LENGTH_KEY,
    LONGEST_KEY,
    REWARD_KEY,
    TRUNCATED_KEY,
)

MISMATCH = "trainer/rollout:"

# Names as the framework writes them, the step's name first; None: it is not watched.
ROWS: dict[str, tuple[str, dict[str, str | None]]] = {
    "SkyRL": ("trainer/global_step", {
        "reward/avg_raw_reward": REWARD_KEY, "generate/avg_num_tokens": LENGTH_KEY,
        "generate/max_num_tokens": LONGEST_KEY, "policy/policy_entropy": ENTROPY_KEY,
        "policy/policy_lr": LEARNING_RATE_KEY, "policy/grad_norm": GRADIENT_NORM_KEY,
        "policy/rollout_train_logprobs_abs_diff_mean": f"{MISMATCH}mean_abs_d",
        "policy/rollout_train_logprobs_abs_diff_max": f"{MISMATCH}max_abs_d",
        "policy/rollout_train_logprobs_abs_diff_std": None,
    }),
    "AReaL": ("global_step", {
        "ppo_actor/task_reward/avg": REWARD_KEY, "ppo_actor/seq_len/avg": LENGTH_KEY,
        "ppo_actor/seq_len/max": LONGEST_KEY, "ppo_actor/no_eos_ratios/avg": TRUNCATED_KEY,
        "ppo_actor/update/entropy/avg": ENTROPY_KEY, "ppo_actor/update/grad_norm": GRADIENT_NORM_KEY,
        "ppo_actor/update/lr": LEARNING_RATE_KEY, "ppo_actor/update/behave_approx_kl/avg": None,
    }),
    "tinker-cookbook": ("step", {
        "env/all/reward/total": REWARD_KEY, "env/all/ac_tokens_per_turn": LENGTH_KEY, "optim/lr": LEARNING_RATE_KEY,
        "optim/entropy": ENTROPY_KEY, "optim/kl_sample_train_v1": f"{MISMATCH}kl",
        "optim/kl_sample_train_v2": f"{MISMATCH}k2_kl", "progress/done_frac": None,
    }),
    "open-instruct": ("training_step", {
        "scores": REWARD_KEY, "val/sequence_lengths": LENGTH_KEY, "val/sequence_lengths_max": LONGEST_KEY,
        "policy/entropy_avg": ENTROPY_KEY, "optim/grad_norm": GRADIENT_NORM_KEY, "lr": LEARNING_RATE_KEY,
        "debug/vllm_vs_local_logprob_diff_mean": f"{MISMATCH}mean_abs_d",
        "debug/vllm_vs_local_logprob_diff_max": f"{MISMATCH}max_abs_d", "debug/vllm_local_reverse_kl": None,
    }),
    "OpenRLHF": ("train/global_step", {
        "train/reward": REWARD_KEY, "train/response_length": LENGTH_KEY, "train/response_clip_ratio": TRUNCATED_KEY,
        "train/actor_lr": LEARNING_RATE_KEY, "train/actor_grad_norm": GRADIENT_NORM_KEY,
        "train/entropy_loss": ENTROPY_KEY, "train/vllm_kl": f"{MISMATCH}kl", "train/ppo_kl": None,
    }),
    "verl": ("training/global_step", {
        "critic/score/mean": REWARD_KEY, "response_length/mean": LENGTH_KEY, "actor/entropy": ENTROPY_KEY,
        "rollout_corr/kl": f"{MISMATCH}kl", "rollout_corr/k3_kl": f"{MISMATCH}k3_kl",
        "training/rollout_probs_diff_max": f"{MISMATCH}rollout_probs_diff_max", "rollout_corr/chi2_token": None,
    }),
    "NeMo-RL": ("step", {
        "train/reward": REWARD_KEY, "train/mean_gen_tokens_per_sample": LENGTH_KEY,
        "train/truncation_rate": TRUNCATED_KEY, "train/approx_entropy": ENTROPY_KEY,
        "train/gen_kl_error": f"{MISMATCH}k3_kl",
        "train/token_mult_prob_error": f"{MISMATCH}token_mult_prob_error", "train/js_divergence_error": None,
    }),
    "slime and miles": ("rollout/step", {
        "rollout/raw_reward": REWARD_KEY, "rollout/response_len/mean": LENGTH_KEY, "train/lr-pg_0": LEARNING_RATE_KEY,
        "train/train_rollout_kl": f"{MISMATCH}k3_kl", "train/train_rollout_logprob_abs_diff": f"{MISMATCH}mean_abs_d",
        "train/pg_clipfrac": None,
    }),
    "prime-rl": ("step", {
        "train/agg/effective/num_output_tokens/mean": LENGTH_KEY,
        "train/agg/effective/num_output_tokens/max": LONGEST_KEY, "entropy/all/mean": ENTROPY_KEY,
        "mismatch_kl/all/mean": f"{MISMATCH}k3_kl", "optim/grad_norm": GRADIENT_NORM_KEY,
        "optim/lr": LEARNING_RATE_KEY, "kl_ent_ratio/mean": None,
        # The name has that of an agent of the user's environment: it is declared.
        "train/agg/effective/solver/reward/mean": None,
    }),
    "ROLL": ("system/step", {
        "critic/score/mean": REWARD_KEY, "tokens/response_length/mean": LENGTH_KEY,
        "tokens/response_length/max": LONGEST_KEY, "critic/entropy/mean": ENTROPY_KEY, "actor/lr": LEARNING_RATE_KEY,
        "actor_train/grad_norm": GRADIENT_NORM_KEY, "actor/train_infer_diff_token_mean": None,
    }),
    "ms-swift": ("global_step", {
        "reward": REWARD_KEY, "completions/mean_length": LENGTH_KEY, "completions/max_length": LONGEST_KEY,
        "completions/clipped_ratio": TRUNCATED_KEY, "entropy/mean": ENTROPY_KEY, "grad_norm": GRADIENT_NORM_KEY,
        "learning_rate": LEARNING_RATE_KEY, "rollout_correction/k3_kl": f"{MISMATCH}k3_kl",
        "rollout_correction/kl": f"{MISMATCH}kl", "rollout_correction/training_ppl": f"{MISMATCH}training_ppl",
        "rollout_correction/log_ppl_abs_diff": f"{MISMATCH}log_ppl_abs_diff", "rollout_correction/chi2_token": None,
    }),
    "torchtitan": ("step", {
        "rollout_reward/_mean": REWARD_KEY, "rollout/response_length/mean": LENGTH_KEY,
        "rollout/response_length/max": LONGEST_KEY, "rollout/truncation_rate/mean": TRUNCATED_KEY,
        "trainer/entropy/mean": ENTROPY_KEY, "trainer/grad_norm/mean": GRADIENT_NORM_KEY,
        "trainer/lr": LEARNING_RATE_KEY, "bit_wise/logprob_diff/max": f"{MISMATCH}max_abs_d",
        "bit_wise/logprob_diff/mean": None,
    }),
    "rLLM": ("progress/batch", {
        "reward/mean": REWARD_KEY, "batch/step_response_length/mean": LENGTH_KEY,
        "batch/step_response_length/max": LONGEST_KEY, "actor/entropy": ENTROPY_KEY, "progress/lr": LEARNING_RATE_KEY,
        "offpolicy/k3_kl": f"{MISMATCH}k3_kl", "offpolicy/kl": f"{MISMATCH}kl",
        "offpolicy/logprob_abs_diff/mean": f"{MISMATCH}mean_abs_d",
        "offpolicy/logprob_abs_diff/max": f"{MISMATCH}max_abs_d",
        "offpolicy/prob_abs_diff/mean": f"{MISMATCH}rollout_probs_diff_mean",
        "offpolicy/training_ppl": f"{MISMATCH}training_ppl", "offpolicy/chi2_token": None,
    }),
}  # fmt: skip


def written(folder: Path, framework: str) -> Path:
    """Return JSON lines of two steps."""
    step, names = ROWS[framework]
    path = folder / "metrics.jsonl"
    rows = [{step: number, **dict.fromkeys(names, 0.5 * number)} for number in (1, 2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("framework", ROWS)
def test_names_of_a_framework_are_read_or_reported(tmp_path: Path, framework: str) -> None:
    _, names = ROWS[framework]
    record = read_record(written(tmp_path, framework))
    assert record.read == {quantity: name for name, quantity in names.items() if quantity is not None}
    assert record.unread == tuple(sorted(name for name, quantity in names.items() if quantity is None))
    assert [step.step for step in record.steps] == [1, 2]
    assert set(record.steps[0].values) == set(record.read)


def test_backtest_prints_what_was_read_and_what_was_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", str(written(tmp_path, "tinker-cookbook"))]) == 0
    read, unread = capsys.readouterr().out.splitlines()[-2:]
    assert "env/all/reward/total as rollout:reward_mean" in read
    assert unread == "  not watched: progress/done_frac"


def test_run_without_reward_length_and_mismatch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "optim/lr": 1e-4, "my/return": 0.5}')
    with pytest.raises(UnreadableRun, match=r"only optim/lr is known; not known: my/return\. Expected"):
        read_record(path)
