"""The distribution of vLLM itself, taken from the logits from which it computes prompt log-probs.

The logits are reduced inside the engine's process against the target's hidden states and head. They are not recomputed
from a copy of the weights, because the engine's kernels, dtypes and rounding are what is measured.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foreshock.rollouts import RolloutBatch, encode_rollouts
from probes.engines.environment import AS_IT_IS, EngineEnvironment
from probes.engines.process import EngineError, process_variables
from probes.exact_divergence.handover import Handover, Job, Refusal
from probes.exact_divergence.result import ExactDivergences
from probes.exact_divergence.sources import LogitSource, SourceError
from probes.exact_divergence.streaming import exact_divergences
from probes.scorers.request import UnsupportedScoreError
from probes.scorers.tokens import vocabulary_size
from probes.scorers.vllm_prefill import PrefillOptions

__all__ = ["EngineDistribution"]

_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class EngineDistribution:
    """The distribution of vLLM's prefill with the weights in the folder `weights`.

    `options` are those of the scorer `vllm.prefill`, such as dtype, head_dtype and temperature (None: 1). The engine
    gets one rollout at a time, prompt and response as one prompt: `batch_size` must not be set, and
    tensor_parallel_size must be 1. If another model shares the GPU, choose gpu_memory_utilization so that both fit,
    with room for the target's head and two tiles of logits. `environment` applies to the engine's process only, not to
    the process that computes the target's states.
    """

    weights: Path
    options: PrefillOptions = field(default_factory=PrefillOptions)
    environment: EngineEnvironment = AS_IT_IS

    def __post_init__(self) -> None:
        if self.options.tensor_parallel_size != 1:
            raise UnsupportedScoreError("the logits of an engine can be had with tensor_parallel_size=1 only")
        if "batch_size" in self.options.model_fields_set:
            raise UnsupportedScoreError("the engine is given one rollout at a time: leave batch_size out")

    def divergences(self, target: LogitSource, rollouts: RolloutBatch, top_ks: Sequence[int]) -> ExactDivergences:
        """Return the divergences [T] of `target` (π) and the engine (μ) at the state before each response token.

        Starts an engine and stops it. Compares the log-probs that vLLM returns with those of the observed logits.
        Raises EngineError if one of them differs, a state was not observed or the engine crashed;
        UnsupportedScoreError if the engine cannot score these rollouts; SourceError if the numbers of states or the
        vocabularies differ.
        """
        vocabulary = vocabulary_size(self.weights)
        if target.tokens != rollouts.num_tokens or vocabulary not in (None, target.vocabulary):
            raise SourceError(
                f"the target's logits are [{target.tokens}, {target.vocabulary}], and the engine's are "
                f"[{rollouts.num_tokens}, {vocabulary}]"
            )
        if not target.tokens:
            return exact_divergences(target, target, token_ids=[], top_ks=top_ks)
        with tempfile.TemporaryDirectory(prefix="foreshock-engine-distribution-") as folder:
            handover = Handover(Path(folder))
            job = Job(weights_folder=self.weights.resolve(), options=self.options, top_ks=tuple(top_ks))
            handover.job.write_text(job.model_dump_json(), "utf-8")
            handover.rollouts.write_bytes(encode_rollouts(rollouts))
            handover.write_target(target)
            status = _run(handover, Path(folder), self.environment)
            if handover.refusal.exists():
                refusal = Refusal.model_validate_json(handover.refusal.read_bytes())
                if refusal.kind == "unsupported":
                    raise UnsupportedScoreError(refusal.reason)
                raise EngineError(refusal.reason, "final")
            if status:
                lines = handover.log.read_text("utf-8", errors="replace").splitlines()[-_LAST_LINES:]
                raise EngineError(f"the engine exited with status {status}:\n" + "\n".join(lines), "retry", gone=True)
            return handover.read_found()


def _run(handover: Handover, folder: Path, environment: EngineEnvironment) -> int:
    """The exit status of the engine's process."""
    command = [sys.executable, "-m", "probes.exact_divergence.engine_side", str(folder)]
    with handover.log.open("wb") as log:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=process_variables(environment),
            start_new_session=True,  # an interrupt is the caller's to handle
            check=False,
        )
    return done.returncode
