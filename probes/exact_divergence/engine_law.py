"""The law of vLLM itself: the very logits from which it computes the log-probs of a prompt.

They are compared in the engine's own process, as they are made, with hidden states and head of another law; nobody
rebuilds them from a copy of the weights, because kernels, dtypes and rounding of the engine are what is to be measured.
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

__all__ = ["EngineLaw"]

_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class EngineLaw:
    """The law of vLLM's prefill with the weights in the folder `weights`, set up as the scorer `vllm.prefill` is.

    `options` are that scorer's, such as dtype, head_dtype and temperature (None: 1). Rollouts are handed over one at a
    time, prompt and response as one prompt, so there is no `batch_size`; and the model has to be in one process, so
    tensor_parallel_size is 1. On a GPU that another model is on too, choose gpu_memory_utilization so that both fit,
    with room for the target's head and for two tiles of logits. The engine's process is held to `environment`; the
    target's states are computed wherever the caller computes them.
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
        """Divergences of `target`, whose states are those before each response token, and the engine's law there [T].

        Starts an engine and ends it. The log-probs that vLLM returns for the tokens are compared with those of the
        logits that were seen: raises EngineError where one is not the same or a state was not seen, or where the engine
        crashed; UnsupportedScoreError where it cannot do this; SourceError where states or vocabularies are not the
        target's.
        """
        vocabulary = vocabulary_size(self.weights)
        if target.tokens != rollouts.num_tokens or vocabulary not in (None, target.vocabulary):
            raise SourceError(
                f"the target's logits are [{target.tokens}, {target.vocabulary}], and the engine's are "
                f"[{rollouts.num_tokens}, {vocabulary}]"
            )
        if not target.tokens:
            return exact_divergences(target, target, token_ids=[], top_ks=top_ks)
        with tempfile.TemporaryDirectory(prefix="foreshock-engine-law-") as folder:
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
