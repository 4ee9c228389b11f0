"""A LoRA adapter and what vLLM samples with it: `python -m tests.probes.adapted BASE ADAPTER ROLLOUTS`."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.digests import weights_digest
from foreshock.rollouts import RolloutBatch, decode_rollouts, encode_rollouts
from foreshock_probes.adapters import merge
from foreshock_probes.engines.process import process_variables, run_tasks
from tests.probes.replaying import Asked, Difference, Score, scores_of_task

# An update of a hundredth of the weights: bfloat16 rounds away much of what a merge adds.
SMALL_UPDATE = 0.003
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(folder: Path, base: Path, scale: float = SMALL_UPDATE, targets: tuple[str, ...] = TARGETS) -> Path:
    """Save a LoRA adapter of rank 8 as PEFT saves it; `scale` is that of the elements of B."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=list(targets)))
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            value.data = scale * torch.randn(value.shape)
    adapted.save_pretrained(str(folder))
    return folder


def sampled_by_vllm(base: Path, adapter: Path, folder: Path) -> RolloutBatch:
    """Return rollouts that vLLM sampled in bfloat16 with the adapter, in a process of its own, with its log-probs."""
    file = folder / "sampled.parquet"
    command = [sys.executable, "-m", "tests.probes.adapted", str(base), str(adapter), str(file)]
    done = subprocess.run(command, env=process_variables(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return decode_rollouts(file.read_bytes())


@dataclass(frozen=True, slots=True)
class LoraReplay:
    """Replays in bfloat16 of what vLLM sampled with its own adapter, compared with the log-probs that it logged.

    `rounding`: k3 up to which a replay equals them, by a replay in other batches. Those of `merged` have the adapter
    merged with the base model.
    """

    rounding: float
    prefill: Score
    decode: Score
    by_torch: Score
    merged: Score
    merged_by_torch: Score
    logged: NDArray[np.float32]

    def k3(self, score: Score) -> float:
        """Return the k3 of a replay to the logged log-probs."""
        return Difference.between(score[0], self.logged).k3


def replayed(base: Path, adapter: Path, folder: Path) -> LoraReplay:
    """Sample with the adapter and replay, with real engines that use `folder`."""
    batch = sampled_by_vllm(base, adapter, folder)
    merge(adapter, base, folder / "merged")
    asked = {"prefill": ("vllm.prefill", ""), "again": ("vllm.prefill", "rebatched"), "decode": ("vllm.decode", "")}
    asked |= {"by_torch": ("torch.bfloat16", "")}
    named: dict[str, Any] = {"adapter": adapter, "weights_digest": weights_digest(adapter)}
    tasks = [replace(Asked(batch, base, *each).task(folder, name), **named) for name, each in asked.items()]
    tasks += [
        Asked(batch, folder / "merged", scorer).task(folder, f"merged.{scorer}")
        for scorer in ("vllm.prefill", "torch.bfloat16")
    ]
    prefill, again, decode, by_torch, merged, merged_by_torch = run_tasks(tasks, scores_of_task, folder).results
    assert batch.rollout_log_probs is not None
    rounding = max(4 * Difference.between(again[0], prefill[0]).k3, 1e-9)
    return LoraReplay(rounding, prefill, decode, by_torch, merged, merged_by_torch, batch.rollout_log_probs)


def _sample(base: str, adapter: str, file: Path) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    engine: Any = LLM(
        model=base, dtype="bfloat16", max_model_len=128, skip_tokenizer_init=True, enforce_eager=True,
        enable_prefix_caching=False, generation_config="vllm", seed=0, enable_lora=True, max_lora_rank=8,
    )  # fmt: skip
    prompts = [[1 + number % 20, 2 + number // 20, 3] for number in range(48)]
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(temperature=1.0, max_tokens=60, logprobs=0, detokenize=False, ignore_eos=True, seed=1),
        lora_request=LoRARequest("adapter", 1, adapter),
        use_tqdm=False,
    )
    responses = [list(output.outputs[0].token_ids) for output in outputs]
    log_probs = [
        [place[token].logprob for place, token in zip(output.outputs[0].logprobs, response, strict=True)]
        for output, response in zip(outputs, responses, strict=True)
    ]
    names = [f"sample-{number}" for number in range(len(prompts))]
    file.write_bytes(encode_rollouts(RolloutBatch.from_lists(names, prompts, responses, rollout_log_probs=log_probs)))


if __name__ == "__main__":
    _sample(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
