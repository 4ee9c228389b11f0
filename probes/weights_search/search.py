"""The search itself: which replays are made, in which order, and when it ends.

1. The announced weights. If they reproduce `rollout` exactly, the search ends.
2. The whole weights of each candidate step, the nearest and the first ones first.
3. The announced weights with one part of a candidate step: head, embeddings, all layers, the rest; then parts that are
   often synchronised together; then halves of the layers, then single layers.

A replay at the noise floor ends the search, after the same part of the other candidates: if another one fits as well,
neither can be named. The best weights are replayed again in an engine that was started with them.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foreshock.api.leases import JobWeightsRecord
from foreshock.digests import digest_of_json
from foreshock.errors import WeightsError
from foreshock.measures.comparison import compare
from foreshock.rollouts import RolloutBatch, decode_rollouts, decode_scores
from foreshock.scorers import NOISE_FLOOR_VARIANT
from foreshock.weights_search import WHOLE, WeightsReplay, WeightsSearch
from foreshock_probes.engines.process import EngineError
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.weights import Weights, WeightsLibrary
from foreshock_probes.weights_search.assembly import (
    Ingredients,
    NotComparableError,
    assemble,
    read_ingredients,
    why_not_comparable,
)

if TYPE_CHECKING:
    from foreshock_probes.job_scoring import LeasedJob

MOST_REPLAYS = 64
"""A bound on the time of a search: a replay takes 0.2 s with a tiny model, and minutes with a large one."""

# Parts that a pipeline stage holds together, or that a sync handles by one rule.
_PAIRS = (("lm_head", "embeddings"), ("lm_head", "other"), ("layers", "other"))

# The service keeps 1,000 characters of a reason.
_LONGEST_REASON = 900

LogProbs = NDArray[np.float32]


class Replay(Protocol):
    """Scores the rollouts with the weights in `folder`; `fresh`: in an engine that never held other ones."""

    def __call__(self, folder: Path, digest: str, *, fresh: bool) -> LogProbs:
        """Return log-probs [T] in nats."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The weights of another announced step; None if they cannot be used, for the reason `missing`."""

    step: int
    weights: Weights | None
    missing: str = ""


class Searcher:
    """One search over the rollouts `batch` of `step`, whose announced weights are `base`.

    Assembled weights are written below `folder` and removed after use; `log` is called with a line for each replay.
    """

    def __init__(
        self,
        step: int,
        scorer: str,
        base: Weights,
        candidates: Sequence[Candidate],
        batch: RolloutBatch,
        replay: Replay,
        folder: Path,
        log: Callable[[str], None],
    ) -> None:
        self._base, self._candidates, self._batch = base, candidates, batch
        self._replay, self._folder, self._log = replay, folder, log
        self._ingredients: dict[int, Ingredients] = {}
        self._digests: dict[tuple[int, str], str] = {}
        self._found = WeightsSearch(step, scorer, batch.num_rollouts, batch.num_tokens)

    def run(self, announced: LogProbs, rebatched: LogProbs) -> WeightsSearch:
        """Search, given the log-probs [T] of the announced weights and of the same in other batches."""
        floor = float(compare(self._batch, rebatched, announced).measures()["k3_kl"])
        self._found = dataclasses.replace(self._found, floor_k3=floor)
        self._add(self._measured(self._found.step, WHOLE, announced))
        for candidate in self._candidates:
            if candidate.weights is None:
                self._add(WeightsReplay(candidate.step, WHOLE, skipped=candidate.missing[:_LONGEST_REASON]))
        try:
            self._end(self._search(announced))
            self._confirm()
        except WeightsError as error:
            self._end(f"it could not go on: {error}")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._found

    def _search(self, announced: LogProbs) -> str:
        """Make the replays and return why the search ended."""
        first = self._found.replays[0]
        if not first.done:
            return "the rollouts have no logged log-prob that could be compared"
        if self._found.is_at_floor(first):
            return "the announced weights are at the noise floor"
        self._read_ingredients()
        if not self._ingredients.keys() - {self._found.step}:
            return "no other weights could be replayed"
        if self._found.tied and not self._untie(announced):
            return "the engine computes otherwise once the tied embeddings are written as two tensors"
        for stage in self._stages():
            for step, part in stage:
                if self._made() >= MOST_REPLAYS:
                    return f"{MOST_REPLAYS} replays were made, the most of one search"
                replay = self._try(step, part)
                if replay is not None and self._found.is_at_floor(replay):
                    self._try_elsewhere(step, part)
                    return f"a replay is at the noise floor: {self._found.describe(replay)}"
        return "all candidates were replayed"

    def _stages(self) -> list[list[tuple[int, str]]]:
        """Return the replays in their order, as (step, part), the whole weights first."""
        steps = [each.step for each in self._candidates if each.step in self._ingredients]
        single = self._ingredients[self._found.step].parts
        layers = [part for part in single if part.startswith("layers.")]
        kinds = [part for part in single if part not in layers]
        kinds[2:2] = ["layers"] if layers else []
        known = set(kinds)
        pairs = ["+".join(pair) for pair in _PAIRS if known.issuperset(pair)]
        if self._found.tied:
            pairs.remove("lm_head+embeddings")  # "embeddings" is both
        half = len(layers) // 2
        halves = [f"layers.0-{half - 1}", f"layers.{half}-{len(layers) - 1}"] if half > 1 else []
        stages = [[(step, WHOLE) for step in steps]]
        stages += [[(step, part) for step in steps for part in parts] for parts in (kinds, pairs, halves)]
        return [*stages, [(step, part) for step in steps for part in layers]]

    def _read_ingredients(self) -> None:
        base = read_ingredients(self._base.folder)
        self._ingredients[self._found.step] = base
        self._found = dataclasses.replace(self._found, tied=base.tied)
        for candidate in self._candidates:
            if candidate.weights is None:
                continue
            try:
                other = read_ingredients(candidate.weights.folder)
                reason = why_not_comparable(base, other)
            except WeightsError as error:
                reason = str(error)
            if reason is None:
                self._ingredients[candidate.step] = other
            else:
                self._add(WeightsReplay(candidate.step, WHOLE, skipped=reason[:_LONGEST_REASON]))

    def _untie(self, announced: LogProbs) -> bool:
        """Start from the announced weights with an untied head; return False if they do not give the same log-probs."""
        base = self._ingredients[self._found.step]
        self._folder.mkdir(exist_ok=True)
        assemble(base, base, (), folder := self._folder / "untied")
        untied = self._replay(folder, digest_of_json([self._base.digest, "untied"]), fresh=True)
        k3 = compare(self._batch, untied, announced).measures()["k3_kl"]
        return self._found.is_at_floor(WeightsReplay(self._found.step, WHOLE, float(k3)))

    def _try(self, step: int, part: str) -> WeightsReplay | None:
        """Replay the announced weights with `part` of `step`; None if a replay with the same values was made."""
        digest = self._digest(step, part)
        known = {(self._found.step, WHOLE): self._base.digest} | self._digests
        same = next((at for at, of in known if of == part and known[at, of] == digest), None)
        if same is not None:
            if same != step:
                words = f"the same values as at step {same}"
                self._add(WeightsReplay(step, part, skipped=words))
            return None
        self._digests[step, part] = digest
        try:
            replay = self._measured(step, part, self._log_probs(step, part))
        except NotComparableError as error:
            self._add(WeightsReplay(step, part, skipped=str(error)[:_LONGEST_REASON]))
            return None
        for candidate in self._candidates:
            if candidate.step == step and candidate.weights is not None:
                candidate.weights.check_unchanged()
        self._add(replay)
        return replay

    def _try_elsewhere(self, step: int, part: str) -> None:
        for candidate in self._candidates:
            if candidate.step != step and candidate.step in self._ingredients:
                self._try(candidate.step, part)

    def _confirm(self) -> None:
        """Replay the best other weights in an engine that is started with them."""
        if self._found.others:
            best = self._found.others[0]
            again = self._measured(best.step, best.part, self._log_probs(best.step, best.part, fresh=True))
            self._found = dataclasses.replace(self._found, confirmed_k3=again.k3_kl)

    def _log_probs(self, step: int, part: str, *, fresh: bool = False) -> LogProbs:
        """Return the log-probs of the announced weights with `part` of `step`, assembled if no folder has them."""
        base, other = self._ingredients[self._found.step], self._ingredients[step]
        digest = digest_of_json([self._base.digest, self._digest(step, part), part])
        if part == WHOLE and other.folder is not None:
            return self._replay(other.folder, digest, fresh=fresh)
        self._folder.mkdir(exist_ok=True)
        folder = self._folder / "assembled"
        try:
            assemble(base, other, self._single_parts(part), folder)
            return self._replay(folder, digest, fresh=fresh)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _digest(self, step: int, part: str) -> str:
        """Return a digest of the values of `part` at `step`; that of the announced weights is known from the start."""
        own = self._found.step
        if part == WHOLE:
            return next((each.weights.digest for each in self._candidates if each.step == step and each.weights), "")
        if (own, part) not in self._digests and step != own:
            self._digests[own, part] = self._ingredients[own].digest_of(self._single_parts(part))
        return self._digests.get((step, part)) or self._ingredients[step].digest_of(self._single_parts(part))

    def _single_parts(self, part: str) -> set[str]:
        """Return the single parts of "all", "layers", "layers.0-3", "lm_head+other", …"""
        single = self._ingredients[self._found.step].parts
        chosen: set[str] = set()
        for name in part.split("+"):
            kind, _, number = name.partition(".")
            if name == WHOLE:
                chosen.update(single)
            elif kind == "layers":
                first, _, last = (number or "0-1000000").partition("-")
                inside = range(int(first), int(last or first) + 1)
                chosen.update(each for each in single if each.startswith("layers.") and int(each[7:]) in inside)
            elif name == "embeddings" and self._found.tied:
                chosen.update(("embeddings", "lm_head"))
            else:
                chosen.add(name)
        return chosen

    def _measured(self, step: int, part: str, log_probs: LogProbs) -> WeightsReplay:
        assert self._batch.rollout_log_probs is not None
        measures = compare(self._batch, log_probs, self._batch.rollout_log_probs).measures()
        return WeightsReplay(
            step=step,
            part=part,
            k3_kl=measures["k3_kl"],
            k3_low=measures["k3_kl_bootstrap_low"],
            k3_high=measures["k3_kl_bootstrap_high"],
            max_abs_d=measures["max_abs_d"],
        )

    def _made(self) -> int:
        return len(self._found.done)

    def _add(self, replay: WeightsReplay) -> None:
        self._found = dataclasses.replace(self._found, replays=(*self._found.replays, replay))
        shown = f"k3 {replay.k3_kl:.3g}" if replay.k3_kl is not None else f"skipped: {replay.skipped}"
        self._log(f"{self._found.describe(replay)}: {shown}")

    def _end(self, why: str) -> None:
        self._found = dataclasses.replace(self._found, ended=why[:_LONGEST_REASON])


def run_job(job: LeasedJob) -> dict[str, Any]:
    """Score the announced weights, search with the other ones, and return the search."""
    scored = {requested.variant: job.score(requested) for requested in job.job.scorers}
    plain = next(requested for requested in job.job.scorers if not requested.variant)
    return search_weights(
        job.job.step,
        job.weights,
        [_candidate(job.library, each, job.job.project) for each in job.job.candidates],
        job.command(plain),
        scored,
        lambda command: job.run_engine(command, None),
        job.log,
    ).to_dict()


def search_weights(
    step: int,
    base: Weights,
    candidates: Sequence[Candidate],
    template: ScoreCommand,
    scored: Mapping[str, bytes],
    score: Callable[[ScoreCommand], object],
    log: Callable[[str], None],
) -> WeightsSearch:
    """Search with the weights of `candidates` and return the result.

    `template` is the command that scored the announced weights `base`; `scored` has its scores by variant, as Parquet;
    `score` has a command done. Weights that are missing or refused, or that the engine cannot load, are skipped, with
    the reason in the result.

    Raises EngineError if an engine fails in a way that another try may not.
    """
    plain, rebatched = (decode_scores(scored[variant]).log_probs for variant in ("", NOISE_FLOOR_VARIANT))

    def replay(folder: Path, digest: str, *, fresh: bool) -> NDArray[np.float32]:
        weights = {"weights_folder": str(folder), "weights_digest": digest, "fresh": fresh}
        try:
            score(template.model_copy(update=weights))
        except EngineError as error:
            if error.kind == "final":
                raise NotComparableError(error.reason) from error
            raise
        return decode_scores(Path(template.scores).read_bytes()).log_probs

    searcher = Searcher(
        step=step,
        scorer=template.scorer,
        base=base,
        candidates=candidates,
        batch=decode_rollouts(Path(template.rollouts).read_bytes()),
        replay=replay,
        folder=Path(template.scores).parent / "weights-search",
        log=log,
    )
    return searcher.run(plain, rebatched)


def _candidate(library: WeightsLibrary, checkpoint: JobWeightsRecord, project: str) -> Candidate:
    try:
        return Candidate(checkpoint.step, library.find(checkpoint, project))
    except WeightsError as error:
        return Candidate(checkpoint.step, None, str(error))
