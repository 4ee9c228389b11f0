"""Certify a model: engines do the parts of the plan, rows are judged, and what differs is explained."""

from __future__ import annotations

import base64
import math
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.certify.certificate import SCHEMA, Certificate, Row, Size, Verdict, write_certificate
from foreshock.certify.judging import LogProbs, judged
from foreshock.certify.text import sentence_of
from foreshock.digests import digest_of_bytes, weights_digest
from foreshock.errors import ConfigurationError
from foreshock.model_kind import model_kind_of_folder
from foreshock.rollouts import RolloutBatch, decode_rollouts, encode_rollouts
from foreshock.scorers import ENGINE_DECODE, ENGINE_REPLAY, REFERENCE, SCORERS
from foreshock_probes.adapters import base_folder_of, is_adapter, merge
from foreshock_probes.certify import conditions as plan
from foreshock_probes.certify.conditions import AGAIN, BASE, LONG_PROMPTS, LONG_TOKENS, OWN, PROMPTS, Condition
from foreshock_probes.certify.explaining import Explanations
from foreshock_probes.certify.parts import Part, Work
from foreshock_probes.certify.prompts import batch_of, long_prompts, prompts_of
from foreshock_probes.engines.process import JobAbandonedError
from foreshock_probes.offers import engine_of
from foreshock_probes.scorers.request import ScoreTask
from foreshock_probes.scorers.tokens import model_configuration, vocabulary_size

Log = Callable[[str], None]
_LONG_ROLLOUTS = 4
_FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class Asked:
    """What to certify: a model's folder, engines and trainer as scorers with their options, and the sizes."""

    model: Path
    engines: Mapping[str, Mapping[str, Any]]
    trainer: str
    trainer_options: Mapping[str, Any]
    prompts: Path | None = None
    rollouts: int = 32
    tokens: int = 64
    longest: int = 1024
    seed: int = 0
    budget: float = 600.0
    rows: tuple[str, ...] = ()
    """names of conditions; empty: all"""
    explain: str = "all"
    """what is done for rows that are different: `all`, `cause` (without layers) or `none`"""


class Certification:
    """One certification in the folder `files`; `given`: rollouts of another certificate, to score the same tokens."""

    def __init__(self, asked: Asked, files: Path, out: Path, log: Log, given: RolloutBatch | None = None) -> None:
        self._asked, self._files, self._out, self._log = asked, files, out, log
        self._start = time.monotonic()
        self._ended = "complete"
        self._is_adapter = is_adapter(asked.model)
        self._base = base_folder_of(asked.model) if self._is_adapter else asked.model
        self._digest = weights_digest(asked.model)
        vocabulary = vocabulary_size(self._base)
        if vocabulary is None:
            raise ConfigurationError(f"{self._base} has no config.json with vocab_size: it holds no language model")
        self._vocabulary = vocabulary
        self._vllm = tuple(each for each in asked.engines if engine_of(each) == "vllm")
        self._options: dict[str, Any] = {name: each for one in self._vllm for name, each in asked.engines[one].items()}
        self._dtype = str(self._options.get("dtype", "bfloat16"))
        adapter = asked.model if self._is_adapter else None
        task = ScoreTask(asked.trainer, "", files, self._base, self._digest, adapter=adapter)
        self._work = Work(files, task)
        self._own = BASE if given is None else OWN
        self._notes: list[str] = []
        self._explanations = Explanations(files, asked, task, self._abandoned)
        self._why: dict[str, tuple[str, tuple[str, ...]]] = {}
        limit = model_configuration(self._base).get("max_position_embeddings")
        longest = min(int(limit) if isinstance(limit, int) else asked.longest, asked.longest)
        most = longest - asked.tokens - 1
        if most < 1:
            raise ConfigurationError(f"--tokens {asked.tokens} leaves no room in a context of {longest} tokens")
        prompts, note = prompts_of(self._base, asked.prompts, asked.rollouts, self._vocabulary, most)
        self._notes.append(note)
        self._work.add(PROMPTS, batch_of(prompts))
        self._work.add(LONG_PROMPTS, batch_of(long_prompts(prompts, longest - LONG_TOKENS - 1, _LONG_ROLLOUTS)))
        self._options.setdefault("max_model_len", longest)
        if given is not None:
            self._work.add(BASE, given)
            self._notes.append("the tokens are those of the other certificate")

    def run(self) -> Certificate:
        """Do all parts and return the certificate, which is written after each process of an engine."""
        try:
            processes = self._processes()
            for number, planned in enumerate(processes, 1):
                made = {part.name for part in planned if part.sampling}
                parts = [part for part in planned if part.rollouts in made or self._work.rollouts(part.rollouts)]
                if not parts:
                    continue
                names = textwrap.shorten(", ".join(part.name for part in parts), 100, placeholder=" …")
                self._log(f"{number} of {len(processes)}, {engine_of(parts[0].scorer)}: {names}")
                self._work.do(parts, self._abandoned)
                write_certificate(self._out, self.certificate())
            found = self.certificate()
            to_explain = [row for row in found.rows if row.verdict == "different" and self._asked.explain != "none"]
            for number, row in enumerate(to_explain, 1):
                self._log(f"explaining {row.name}, {number} of {len(to_explain)}")
                self._explain(row)
        except JobAbandonedError:
            self._ended = f"the budget of {self._asked.budget:g} s was spent"
        except KeyboardInterrupt:
            self._ended = "interrupted"
        except OSError as error:
            self._ended = f"the engines' files cannot be written to {self._files.parent} ({error.strerror})"
        found = self.certificate()
        write_certificate(self._out, found)
        return found

    def certificate(self) -> Certificate:
        """Return the certificate of what has been done so far."""
        rows = tuple(self._row(each) for each in self._conditions())
        base = self._work.rollouts(BASE)
        tokens = {}
        if base is not None:
            # Without what an engine logged.
            attributes = replace(base.attributes, engine_fingerprint=None)
            bare = replace(base, rollout_log_probs=None, attributes=attributes)
            tokens[_digest(base)] = base64.b64encode(encode_rollouts(bare)).decode()
        names = (ENGINE_DECODE, *self._asked.engines, f"trainer {BASE}", f"{REFERENCE} {BASE}")
        scored = {name: self._work.scores(name) for name in names}
        configuration = model_configuration(self._base)
        return Certificate(
            schema=SCHEMA,
            model=self._asked.model.resolve().name,
            model_digest=self._digest,
            architecture=str((configuration.get("architectures") or ["unknown"])[0]),
            model_kind=model_kind_of_folder(self._base),
            parameters=_parameters(self._base),
            engines=tuple(_named(name, options) for name, options in self._asked.engines.items()),
            trainer=_named(self._asked.trainer, self._asked.trainer_options),
            made_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            seconds=time.monotonic() - self._start,
            ended=self._ended,
            rows=rows,
            fingerprints={name: found[1].to_dict() for name, found in scored.items() if found is not None},
            token_sets=tokens,
            notes=tuple(self._notes),
        )

    def _conditions(self) -> list[Condition]:
        float32 = self._asked.trainer in plan.REPLAYED_IN_FLOAT32 and self._dtype != _FLOAT32
        asked, engines = self._asked.rows, tuple(self._asked.engines)
        rows = plan.conditions_of(
            self._asked.trainer, engines, self._vllm, float32, self._own, adapter=self._is_adapter
        )
        known = {each.name: each for each in rows}
        if unknown := set(asked) - set(known):
            raise ConfigurationError(f"--rows: there is no condition {min(unknown)}; there are {', '.join(known)}")
        return [each for name, each in known.items() if not asked or name in asked]

    def _processes(self) -> list[tuple[Part, ...]]:
        rows = self._conditions()
        needed = {name for each in rows for name in (each.one, each.other, *(each.float32 or ())) if ":" not in name}
        sets = tuple(dict.fromkeys([BASE, self._own, *(each.rollouts for each in rows)]))
        again = any(f"logged:{AGAIN}" in (each.one, each.other) for each in rows)
        sampled = {
            name: plan.sampling_of(name, self._asked.seed, self._asked.tokens, self._vocabulary)
            for name in (self._own, *sets, *([AGAIN] if again else []))
            if name != BASE or self._own == BASE
        }
        merged = None
        if self._is_adapter and "merged float32" in needed:
            merged = self._files / "merged"
            merge(self._asked.model, self._base, merged)
        of_vllm = plan.vllm_parts(self._options, sampled, self._own, merged) if self._vllm else ((), ())
        others = [
            (Part(name=each, scorer=each, rollouts=BASE, options=dict(self._asked.engines[each])),)
            for each in self._asked.engines
            if each not in self._vllm
        ]
        floors = tuple(each for each in sets if each != AGAIN)
        of_torch = plan.torch_parts(self._asked.trainer, self._asked.trainer_options, floors, self._dtype)
        first, second = (tuple(part for part in parts if part.sampling or part.name in needed) for parts in of_vllm)
        return [each for each in (first, *others, of_torch, second) if each]

    def _abandoned(self) -> bool:
        return time.monotonic() - self._start > self._asked.budget

    def _row(self, condition: Condition) -> Row:
        name, title = condition.name, condition.title

        def left_out(why: str) -> Row:
            return Row(name=name, title=title, verdict="not tried", sentence=why)

        batch = self._work.rollouts(condition.rollouts)
        if batch is None:
            return left_out(self._why_not(condition.rollouts))
        found = [self._log_probs(each, batch, condition) for each in (condition.one, condition.other)]
        for reference, values in zip((condition.one, condition.other), found, strict=True):
            if values is None:
                return left_out(self._why_not(reference))
        one, other = (each for each in found if each is not None)
        verdicts: list[Verdict] = []
        sizes: list[Size] = []
        scored = self._work.scores(condition.other) if condition.other in self._asked.engines else None
        of_engine = scored[1].dtype if scored is not None else None
        pairs = [(condition.dtype or of_engine or self._dtype, one, other)]
        if condition.float32 is not None:
            twins = [self._work.scores(each) for each in condition.float32]
            if twins[0] is not None and twins[1] is not None:
                pairs.append((_FLOAT32, twins[0][0], twins[1][0]))
        for dtype, first, second in pairs:
            floors = (
                self._work.scores(f"{each} {condition.rollouts}") for each in plan.FLOORS.get(dtype, plan.HALF_FLOOR)
            )
            replays = [each[0] for each in floors if each is not None]
            if len(replays) < 2:
                return left_out(f"no floor was measured: {self._why_not(f'{REFERENCE} {condition.rollouts}')}")
            chosen = self._chosen(condition, batch, first, second)
            if not chosen.any():
                return left_out("there is no token to compare")
            verdict, size = judged(batch, first, second, replays, dtype, chosen)
            verdicts.append(verdict)
            sizes.append(size)
        # That of the row's own precision, unless float32 differs.
        verdict = "different" if "different" in verdicts else verdicts[0]
        note = ""
        if condition.tokens == "common" and (moved := self._moved(batch)):
            verdict = "rounding" if verdict == "identical" else verdict
            note = f" {moved} of {batch.num_rollouts} rollouts have other tokens from some place on."
        cause, why = self._why.get(name, ("", ()))
        return Row(
            name=name,
            title=title,
            verdict=verdict,
            sentence=sentence_of(verdict, sizes) + note,
            sizes=tuple(sizes),
            rollouts=_digest(batch),
            cause=cause,
            why=why,
        )

    def _log_probs(self, reference: str, batch: RolloutBatch, condition: Condition) -> LogProbs | None:
        kind, _, name = reference.partition(":")
        if kind != "logged":
            found = self._work.scores(reference)
            if found is None:
                return None
            # A part of the rollouts was scored.
            return np.pad(found[0], (0, batch.num_tokens - found[0].size), constant_values=np.nan)
        rollouts = self._work.rollouts(name)
        if rollouts is None or rollouts.rollout_log_probs is None:
            return None
        return rollouts.rollout_log_probs if name == condition.rollouts else _on_common_tokens(batch, rollouts)

    def _chosen(self, condition: Condition, batch: RolloutBatch, *values: LogProbs) -> NDArray[np.bool_]:
        chosen: NDArray[np.bool_] = np.logical_and.reduce([~np.isnan(each) for each in values])
        if condition.tokens == "last":
            stopped = np.array([each == "stop" for each in batch.finish_reasons or []], np.bool_)
            last = np.zeros(batch.num_tokens, np.bool_)
            last[batch.response_offsets[1:][stopped] - 1] = True
            chosen &= last
        return chosen

    def _moved(self, batch: RolloutBatch) -> int:
        again = self._work.rollouts(AGAIN)
        if again is None:
            return 0
        common = _on_common_tokens(batch, again)
        return int(np.unique(np.repeat(np.arange(batch.num_rollouts), batch.response_lengths)[np.isnan(common)]).size)

    def _why_not(self, reference: str) -> str:
        name = reference.removeprefix("logged:")
        problem = self._work.problem(name)
        if problem is not None:
            return problem
        engine = name.partition(" ")[0]
        if engine in SCORERS and engine not in self._asked.engines and SCORERS[engine].engine == "vllm":
            return f"{engine} is not among the engines"
        if not self._vllm and not name.startswith(("trainer", "torch")):
            return "only vLLM's settings can be changed from here; a running server has those that it was started with"
        return "not reached" if self._ended == "complete" else self._ended

    def _explain(self, row: Row) -> None:
        condition = next(each for each in self._conditions() if each.name == row.name)
        if row.name in plan.UNEXPLAINED:
            return
        beyond = {size.dtype for size in row.sizes if size.half_square_low > size.floor}
        batch = self._work.rollouts(condition.rollouts)
        assert batch is not None

        def logged(pair: tuple[str, str]) -> RolloutBatch:
            one, other = (self._log_probs(each, batch, condition) for each in pair)
            assert one is not None
            assert other is not None
            return replace_logged(batch, one, other, condition)

        own, dtype = logged((condition.one, condition.other)), condition.dtype or self._dtype
        if _FLOAT32 in beyond and condition.float32 is not None:
            usual = own if dtype in beyond else None
            why = self._explanations.of(condition, logged(condition.float32), _FLOAT32, usual)
        else:
            why = self._explanations.of(condition, own, dtype)
        self._why[row.name] = why
        write_certificate(self._out, self.certificate())


def replace_logged(batch: RolloutBatch, one: LogProbs, other: LogProbs, condition: Condition) -> RolloutBatch:
    """Return the rollouts with the two results as what an engine and a trainer logged.

    A row without a trainer has none: the engine's is the result under the condition, or of decode against prefill.
    """
    of_trainer = condition.one.startswith("trainer")
    engine = other if of_trainer or condition.one == ENGINE_REPLAY else one
    return replace(batch, rollout_log_probs=engine, trainer_log_probs=one if of_trainer else None)


def given_rollouts(certificate: Certificate) -> RolloutBatch | None:
    """Return the tokens of a certificate; None if it has none."""
    for digest, text in certificate.token_sets.items():
        data = base64.b64decode(text)
        batch = decode_rollouts(data)
        if _digest(batch) != digest:
            raise ConfigurationError("the tokens of the other certificate do not have the digest that it gives")
        return batch
    return None


def _digest(batch: RolloutBatch) -> str:
    arrays = (batch.prompt_token_ids, batch.prompt_offsets, batch.response_token_ids, batch.response_offsets)
    return digest_of_bytes(b"".join(np.ascontiguousarray(each).tobytes() for each in arrays))


def _on_common_tokens(batch: RolloutBatch, other: RolloutBatch) -> LogProbs:
    """Return the log-probs of `other` at the tokens of `batch`, up to the first that differs; then NaN."""
    found = np.full(batch.num_tokens, np.nan, np.float32)
    assert other.rollout_log_probs is not None
    for row in range(batch.num_rollouts):
        start, stop = batch.response_offsets[row : row + 2].tolist()
        first, last = other.response_offsets[row : row + 2].tolist()
        length = min(stop - start, last - first)
        mine, theirs = (
            ids[at : at + length] for ids, at in ((batch.response_token_ids, start), (other.response_token_ids, first))
        )
        differing = np.flatnonzero(mine != theirs)
        length = int(differing[0]) if differing.size else length
        found[start : start + length] = other.rollout_log_probs[first : first + length]
    return found


def _named(scorer: str, options: Mapping[str, Any]) -> str:
    return scorer + (":" + ",".join(f"{name}={value}" for name, value in options.items()) if options else "")


def _parameters(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (not a dict)
    return total
