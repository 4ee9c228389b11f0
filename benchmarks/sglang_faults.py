"""Faults of an SGLang server that the doctor must name from what the server logged, for `make bench-engines`.

Each server samples on this machine's CPU in bfloat16, with the fault in its weights, its `config.json` or its sampling
parameters; the trainer is an autocast pass over the announced weights. The doctor gets the rollouts, the announced
weights and those of an older version, but no information about the fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.doctor.lab import (
    LONGEST,
    RESPONSES,
    Rows,
    batch_of,
    new_model,
    prompts_of,
    save,
    score,
    updated,
    with_config,
)
from examples.tiny_rl.sglang_sampler import IN_BFLOAT16, running_sglang
from foreshock.doctor import Budget, examine
from foreshock_probes.doctor.experimenter import TorchExperimenter

SEED, END = 1, 1


@dataclass(frozen=True)
class Fault:
    """A fault, with the cause that names it; "" if no cause may be named.

    `fields` are changed in the configuration that its server reads, `parameters` are those of sampling, `weights` is
    the folder that the server loads.
    """

    name: str
    cause: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "step_0010"


FAULTS = (
    Fault("none", ""),
    # SGLang reports log-probs before truncation, so top-p leaves no trace in them.
    Fault("top-p 0.7", "", parameters={"top_p": 0.7}),
    # SGLang's repetition penalty ignores the prompt; vLLM's does not.
    Fault("repetition penalty 1.2, undeclared", "repetition_penalty", parameters={"repetition_penalty": 1.2}),
    Fault("frequency penalty 0.3, undeclared", "frequency_penalty", parameters={"frequency_penalty": 0.3}),
    # min_new_tokens is not possible here: these servers have no tokenizer and refuse it.
    Fault("logit bias of one id", "token_bias", parameters={"logit_bias": {"5": 2.0}}),
    Fault("temperature 0.8, undeclared", "temperature", parameters={"temperature": 0.8}),
    Fault("presence penalty 0.5, undeclared", "presence_penalty", parameters={"presence_penalty": 0.5}),
    Fault("weights that were not updated", "other_weights", weights="step_0007"),
    Fault("a head that was not updated", "part_of_weights", weights="head_of_0007"),
    Fault("rope_theta 100000 in config.json", "rope_theta", fields={"rope_theta": 1e5}),
    Fault("rms_norm_eps 0.01 in config.json", "norm_eps", fields={"rms_norm_eps": 1e-2}),
)


def judged(root: Path) -> Iterator[tuple[Fault, list[str]]]:
    """Yield each fault with the causes that the doctor names; a cause has its side unless that is the engine."""
    model = new_model("random", SEED)
    old = updated(model, SEED + 1, 0.03)
    announced, older = save(model, root / "step_0010"), save(old, root / "step_0007")
    head = with_config(model)
    head.lm_head.weight.data.copy_(old.lm_head.weight)
    save(head, root / "head_of_0007")
    # The server of a faulty configuration is started on a folder that has it.
    of_fields = {tuple(each.fields.items()): each.fields for each in FAULTS}
    for number, (key, fields) in enumerate(of_fields.items()):
        folder = save(with_config(model, **fields), root / f"served_{number}")
        arguments = (*IN_BFLOAT16, "--random-seed", str(SEED))
        with running_sglang(folder, root / f"server_{number}.log", *arguments) as server:
            for fault in (each for each in FAULTS if tuple(each.fields.items()) == key):
                held = folder if fields else root / fault.weights
                server.post("/update_weights_from_disk", json={"model_path": str(held)}).raise_for_status()
                rows = _sampled(server, model, fault.parameters)
                batch = batch_of(rows, score(model, rows))
                experimenter = TorchExperimenter.of_folders(batch, announced, announced, [older], threads=1)
                report = examine(batch, experimenter, Budget(seconds=300))
                yield (
                    fault,
                    [each.cause if each.side == "rollout" else f"{each.side} {each.cause}" for each in report.causes],
                )


def _sampled(server: httpx.Client, model: Any, parameters: Mapping[str, Any]) -> Rows:
    """Return the tokens that the server samples, with the log-probs that it reports."""
    groups = [(group, prompt) for group, prompt in enumerate(prompts_of(model, SEED)) for _ in range(RESPONSES)]
    sampling = {"max_new_tokens": LONGEST, "temperature": 1.0, "stop_token_ids": [END], **parameters}
    body = {"input_ids": [prompt for _, prompt in groups], "sampling_params": sampling, "return_logprob": True}
    answers = server.post("/generate", json=body).raise_for_status().json()
    logged = [[entry[0] for entry in each["meta_info"]["output_token_logprobs"]] for each in answers]
    return Rows(
        [prompt for _, prompt in groups],
        [each["output_ids"] for each in answers],
        [np.asarray(each, np.float32) for each in logged],
        [group for group, _ in groups],
    )
