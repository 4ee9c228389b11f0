"""The environment of a job: the run's own if its worker offers it, else the worker's, unless one is required.

A worker offers environments by name (`foreshock.environment`). A job names the wanted ones, best first. A worker scores
it in the first that it offers; if it offers none, as it is, or it does not get the job if an environment is required.

The run also declares the precision of its trainer, which is a probe's default for `torch.trainer`. The trainer's
fingerprint has `master_dtype` with `autocast` (absent: no autocast), or only `dtype` "float32". `dtype` "bfloat16"
alone declares nothing: it may describe the weights or only the activations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreshock import errors, rollouts, scorers
from foreshock.environment import Environment
from foreshock.fingerprint import Fingerprint

# Values of a request that name no environment. OF_RUN: the run's own is required. ANY: the worker's default.
OF_RUN, ANY = "run", "any"


@dataclass(frozen=True, slots=True)
class WantedEnvironment:
    """The names of environments to score in, best first; empty: any."""

    names: Sequence[str] = ()
    is_required: bool = False

    def best_of(self, offered: Collection[str]) -> str | None:
        return next((name for name in self.names if name in offered), None)

    def accepts(self, offered: Collection[str]) -> bool:
        """Return whether a worker that offers these environments may do the job."""
        return not (self.is_required and self.names) or self.best_of(offered) is not None


def run_fingerprints(attributes: rollouts.BatchAttributes, attempt: Mapping[str, Any]) -> dict[str, Fingerprint | None]:
    """Return the fingerprints of the logged scores `rollout` and `trainer`; None if the run logged none.

    They are attributes of the batch; if absent, the attempt's fingerprint has them by name
    (`{"rollout": {…}, "trainer": {…}}`) or is one of them: the trainer's if its engine is torch, else the sampler's.
    """
    named: dict[str, Any] = dict(attempt)
    if isinstance(attempt.get("engine"), str):
        named = {"trainer" if attempt["engine"] == "torch" else "rollout": attempt}
    return {
        "rollout": attributes.engine_fingerprint or _parsed(named.get("rollout")),
        "trainer": attributes.trainer_fingerprint or _parsed(named.get("trainer")),
    }


def wanted_environments(
    request: str | None, fingerprints: Mapping[str, Fingerprint | None]
) -> dict[str, WantedEnvironment]:
    """Return the wanted environment of each engine's job.

    `request` None: the run's own is preferred. The engine's job takes the environment of the sampler, the trainer's job
    that of the trainer. If one of them is unknown, both jobs take the known one, so that the replays can be compared.
    """
    if request == ANY:
        return dict.fromkeys(scorers.ENGINES, WantedEnvironment())
    if request not in (None, OF_RUN):
        return dict.fromkeys(scorers.ENGINES, WantedEnvironment((request,), is_required=True))
    known = {name: _names(fingerprint) for name, fingerprint in fingerprints.items()}
    sampler, trainer = known.get("rollout", ()), known.get("trainer", ())
    sides = {"engine": sampler or trainer, "trainer": trainer or sampler}
    side_of = {each.engine: each.side for each in reversed(scorers.SCORERS.values()) if each.side is not None}
    # A remote engine computes on its server's machine, whatever the worker's is.
    return {
        name: WantedEnvironment()
        if engine.remote
        else WantedEnvironment(sides[side_of.get(name, "trainer")], request == OF_RUN)
        for name, engine in scorers.ENGINES.items()
    }


def _names(fingerprint: Fingerprint | None) -> tuple[str, ...]:
    return Environment.of_fingerprint(fingerprint).offer_names() if fingerprint is not None else ()


def _parsed(value: object) -> Fingerprint | None:
    if not isinstance(value, Mapping):
        return None
    try:
        return Fingerprint.from_dict(value)
    except errors.ConfigurationError:
        return None


def names_in_words(names: Sequence[str]) -> str:
    """Return names for a message: "avx2-amd, avx2-sse4.2 or avx2"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_TRAINER = scorers.TRAINER_REPLAY
_MASTER_DTYPES = ("bfloat16", "float16", "float32")
_AUTOCAST = ("bfloat16", "float16")
_PRECISION = frozenset({"autocast", "master_dtype", "head_dtype"})


def with_declared_precision(
    options: Mapping[str, Mapping[str, Any]], scorers: Collection[str], trainer: Fingerprint | None
) -> dict[str, dict[str, Any]]:
    """Return the options of a probe, with the trainer's declared precision for `torch.trainer` if that is requested.

    Options that name any precision are left unchanged.
    """
    found = {scorer: dict(chosen) for scorer, chosen in options.items()}
    asked = found.get(_TRAINER, {})
    declared = declared_precision(trainer)
    if _TRAINER in scorers and declared and not _PRECISION & set(asked):
        found[_TRAINER] = {**declared, **asked}
    return found


def precision_in_words(declared: Mapping[str, str | None]) -> str | None:
    """Return a declared precision, such as "bfloat16 autocast over float32 weights"; None if none is declared."""
    master, autocast, head = (declared.get(name) for name in ("master_dtype", "autocast", "head_dtype"))
    if master is None:
        return None
    words = master if autocast is None else f"{autocast} autocast over {master} weights"
    return words if head in (None, master) else f"{words}, head in {head}"


def declared_precision(trainer: Fingerprint | None) -> dict[str, str | None]:
    """Return the options of `torch.trainer` that a trainer's fingerprint declares; empty if it declares none."""
    if trainer is None:
        return {}
    master = trainer.master_dtype or ("float32" if trainer.dtype == "float32" and not trainer.autocast else None)
    if master not in _MASTER_DTYPES:
        return {}
    found: dict[str, str | None] = {
        "master_dtype": master,
        "autocast": trainer.autocast if trainer.autocast in _AUTOCAST else None,
    }
    return found | ({"head_dtype": trainer.head_dtype} if trainer.head_dtype in _MASTER_DTYPES else {})
