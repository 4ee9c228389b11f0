"""The engine's process of `EngineDistribution`: `python -m foreshock_probes.exact_divergence.engine_process FOLDER`.

vLLM's prefill gets one rollout at a time; `observed_logits` reduces its logits against the target's states.
"""

from __future__ import annotations

import sys
from pathlib import Path

from foreshock.rollouts import decode_rollouts
from foreshock_probes.engines.environment import hold_this_process
from foreshock_probes.exact_divergence.divergences import ExactDivergences
from foreshock_probes.exact_divergence.engine_distribution import Job, JobFolder, Refusal
from foreshock_probes.exact_divergence.observed_logits import NotReproducedError, PromptLogitsHook, RolloutReduction
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.tokens import check_tokens, sequence, sequence_lengths
from foreshock_probes.scorers.vllm_engine import VllmEngine, engine_arguments
from foreshock_probes.scorers.vllm_scorers import prompt_log_probs

__all__ = ["main"]

# At import, because processes that the engine spawns import this module too and must use the same environment.
hold_this_process()


def main() -> int:
    """Run the job in the folder and return the exit status; a refusal is written there, other errors are raised."""
    files = JobFolder(Path(sys.argv[1]))
    try:
        files.write_divergences(_divergences_of(files))
    except UnsupportedScoreError as error:
        files.refusal.write_text(Refusal(kind="unsupported", reason=str(error)).model_dump_json(), "utf-8")
    except NotReproducedError as error:
        files.refusal.write_text(Refusal(kind="not_reproduced", reason=str(error)).model_dump_json(), "utf-8")
    return 0


def _divergences_of(files: JobFolder) -> ExactDivergences:
    job = Job.model_validate_json(files.job.read_bytes())
    with files.rollouts.open("rb") as file:
        rollouts = decode_rollouts(file)
    check_tokens(rollouts, job.weights_folder)
    longest = int(sequence_lengths(rollouts).max(initial=1))
    engine = VllmEngine(engine_arguments(job.weights_folder, job.options, longest), weights_digest="")
    engine.divide_logits_by(job.options.temperature or 1.0)
    target = files.read_target(engine.device)
    reduction = RolloutReduction(target, job.top_ks)
    engine.apply(PromptLogitsHook(reduction.add_logits).attach)
    for row in range(rollouts.num_rollouts):
        first, stop = (int(offset) for offset in rollouts.response_offsets[row : row + 2])
        if stop > first:
            tokens = sequence(rollouts, row)
            reduction.start_rollout(tokens, first, tokens.size - (stop - first))
            (output,) = engine.prefill([tokens])
            reduction.finish_rollout(row, prompt_log_probs(output, tokens.size - (stop - first)))
    return reduction.divergences()


if __name__ == "__main__":
    sys.exit(main())
