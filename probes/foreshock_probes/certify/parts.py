"""The work of engines: sample a set of rollouts, or score one. An engine's process does many parts, one after another.

Importing vLLM takes longer than starting a small model in it, so parts with other options share a process. A part that
fails leaves its reason in a file, and the others go on. If the process dies, the part that it worked on has the reason,
and a new process does the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter

from foreshock.digests import weights_digest
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import (
    BatchAttributes,
    RolloutBatch,
    decode_rollouts,
    decode_scores,
    encode_rollouts,
    encode_scores,
)
from foreshock_probes.engines.process import EngineError, run_tasks
from foreshock_probes.scorers.request import Report, ScoreRequest, ScoreTask, WarmModel, write_result

FUNCTION = f"{__name__}:run_part"
_LONGEST_REASON = 400
_MOST_DEATHS = 3
DOING = "doing"


class Sampling(BaseModel):
    """How to sample a response for each prompt; `stop`: at any of these ids, which the response then ends with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: list[int] = []

    @property
    def is_tempered(self) -> bool:
        """Whether the distribution is another one than the model's."""
        return self.temperature != 1.0 or self.top_p < 1.0 or self.top_k > 0


class Part(BaseModel):
    """Score the set `rollouts` by a scorer; with `sampling`, sample the set `name` for the prompts of `rollouts`.

    `times`: how often in a row; the last result counts, so that the engine's caches are full. `threads`: 0: the
    engine's own choice. `weights`: another folder than that of the model, without an adapter.
    `first`: only so many rollouts, 0: all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    scorer: str
    rollouts: str
    variant: str = ""
    options: dict[str, Any] = {}
    times: int = 1
    threads: int = 0
    weights: str | None = None
    first: int = 0
    sampling: Sampling | None = None


_PARTS: TypeAdapter[list[Part]] = TypeAdapter(list[Part])


class Work:
    """The sets of rollouts and the results in a folder, for one model."""

    def __init__(self, folder: Path, task: ScoreTask) -> None:
        self._folder, self._task = folder, task

    def add(self, name: str, rollouts: RolloutBatch) -> None:
        """Store a set of rollouts."""
        write_result(encode_rollouts(rollouts), self._rollouts(name))

    def rollouts(self, name: str) -> RolloutBatch | None:
        """Return a set of rollouts; None if it was not made."""
        path = self._rollouts(name)
        return decode_rollouts(path.read_bytes()) if path.is_file() else None

    def scores(self, name: str) -> tuple[np.ndarray[Any, np.dtype[np.float32]], Fingerprint] | None:
        """Return the log-probs [T] and the fingerprint of a part; None if it has no result."""
        path = _result(self._folder, name)
        if not path.is_file():
            return None
        found = decode_scores(path.read_bytes())
        return found.log_probs, found.fingerprint

    def problem(self, name: str) -> str | None:
        """Return why a part has no result, in the words of who failed; None if nobody tried."""
        path = _problem(self._folder, name)
        # A full disk leaves an empty file.
        return path.read_text("utf-8") or None if path.is_file() else None

    def is_done(self, part: Part) -> bool:
        """Return whether a part has a result or a problem."""
        path = self._rollouts(part.name) if part.sampling else _result(self._folder, part.name)
        return path.is_file() or self.problem(part.name) is not None

    def do(self, parts: Sequence[Part], abandoned: Callable[[], bool]) -> None:
        """Do parts of one engine in one process, and what is left in a new one if it dies.

        Raises JobAbandonedError if `abandoned` returns True.
        """
        for _ in range(_MOST_DEATHS):
            left = [part for part in parts if not self.is_done(part)]
            if not left:
                return
            (self._folder / DOING).write_text(left[0].name, "utf-8")
            task = replace(
                self._task,
                scorer=left[0].scorer,
                rollouts=self._rollouts(left[0].rollouts),
                result=self._folder / "done",
                function=FUNCTION,
                arguments={"parts": _PARTS.dump_json(left).decode()},
            )
            try:
                run_tasks([task], lambda each: each.result.read_bytes(), self._folder, abandoned=abandoned)
            except EngineError as error:
                name = (self._folder / DOING).read_text("utf-8")
                _problem(self._folder, name).write_text(shortened(str(error)), "utf-8")
        for part in parts:
            if not self.is_done(part):
                _problem(self._folder, part.name).write_text("the engine's process died again and again", "utf-8")

    def _rollouts(self, name: str) -> Path:
        return self._folder / f"{name}.rollouts"


def shortened(text: str) -> str:
    """Return an engine's message in one line, its beginning and its end."""
    line = " ".join(text.split())
    half = _LONGEST_REASON // 2
    return line if len(line) <= _LONGEST_REASON else f"{line[:half]} … {line[-half:]}"


def run_part(request: ScoreRequest, warm: WarmModel, report: Report) -> None:
    """Do the parts of `arguments` as a task of an engine; a failure of one is written to a file of its own."""
    folder = request.result.parent
    for number, part in enumerate(_PARTS.validate_json(request.arguments["parts"])):
        (folder / DOING).write_text(part.name, "utf-8")
        report(number)
        try:
            _do(part, request, folder, warm)
        except Exception as error:
            _problem(folder, part.name).write_text(shortened(f"{type(error).__name__}: {error}"), "utf-8")
    write_result(b"done", request.result)


def _do(part: Part, request: ScoreRequest, folder: Path, warm: WarmModel) -> None:
    from foreshock_probes.score import scores_of

    path = folder / f"{part.rollouts}.rollouts"
    if not path.is_file():
        raise FileNotFoundError(f"the set {part.rollouts} was not sampled")
    rollouts = decode_rollouts(path.read_bytes())
    if part.first:
        rollouts = rollouts.select(list(range(min(part.first, rollouts.num_rollouts))))
    own = replace(request, scorer=part.scorer, variant=part.variant, rollouts=rollouts, options=part.options)
    if part.weights is not None:
        digest = weights_digest(part.weights)
        own = replace(own, weights_folder=Path(part.weights), weights_digest=digest, adapter=None, merged_adapter=True)
    if part.threads:
        _hold_threads(part.threads)
    if part.sampling is not None:
        write_result(encode_rollouts(_sampled(own, part.sampling, warm)), folder / f"{part.name}.rollouts")
        return
    for _ in range(part.times):
        scores = scores_of(own, warm, lambda _: None)
    write_result(encode_scores(scores), _result(folder, part.name))


def _hold_threads(threads: int) -> None:
    import torch

    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    torch.set_num_threads(threads)


def _sampled(request: ScoreRequest, how: Sampling, warm: WarmModel) -> RolloutBatch:
    """Return rollouts of the prompts that vLLM sampled, with its log-probs of the distribution that it sampled from."""
    from vllm import SamplingParams

    from foreshock_probes.scorers.request import parse_options
    from foreshock_probes.scorers.vllm_engine import Prepared, VllmEngine, VllmOptions, engine_arguments

    options, prompts = parse_options(VllmOptions, request), request.rollouts
    lengths = np.diff(prompts.prompt_offsets)
    longest = int(lengths.max(initial=0)) + how.tokens
    arguments = engine_arguments(request.weights_folder, options, longest, request.adapter)
    # At temperature 1 without truncation both modes are equal, and the engine is that of the scorers.
    if how.is_tempered:
        arguments["logprobs_mode"] = "processed_logprobs"
    key = (repr(sorted(arguments.items())), request.weights_digest)
    engine = warm.get(key, lambda: VllmEngine(arguments, request.adapter))
    parameters = [
        SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            seed=how.seed + row,
            max_tokens=how.tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=how.stop or None,
        )
        for row in range(prompts.num_rollouts)
    ]
    rows = np.split(prompts.prompt_token_ids, prompts.prompt_offsets[1:-1])
    outputs: list[Any] = [output.outputs[0] for output in engine.generate(rows, parameters)]
    prepared = Prepared(engine, np.ones(prompts.num_rollouts) * how.temperature)
    fingerprint = prepared.fingerprint(request, options, "as sampled")
    return RolloutBatch.from_lists(
        prompts.sample_ids,
        [row.tolist() for row in rows],
        [list(output.token_ids) for output in outputs],
        rollout_log_probs=[_sampled_log_probs(output) for output in outputs],
        group_ids=prompts.group_ids,
        finish_reasons=[output.finish_reason for output in outputs],
        check_values=False,
        attributes=BatchAttributes(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            logprobs_mode="processed_logprobs",
            engine_fingerprint=fingerprint,
        ),
    )


def _sampled_log_probs(output: Any) -> list[float]:
    flat = output.logprobs
    return [float(flat.logprobs[start]) for start in flat.start_indices]


def _result(folder: Path, name: str) -> Path:
    return folder / f"{name}.scores"


def _problem(folder: Path, name: str) -> Path:
    return folder / f"{name}.problem"
