"""The table of scorers: everything that gives a response token a log-prob.

The service offers these scorers, workers implement them, and attribution, commands, pages and dashboards read their
names, order, texts and colours here. To add a scorer, write its function in a file of
`probes/foreshock_probes/scorers/` and add its row to `SCORERS`; a scorer of a new engine also adds the engine to
`ENGINES`. Other packages add theirs by an entry point of the group `foreshock.scorers`. `EXACT_PAIRS` lists the pairs
of scorers whose distributions workers compare over the whole vocabulary.
"""

import importlib.metadata
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from foreshock.comparisons import TRAINER_ROLLOUT, comparison_name

Side = Literal["engine", "trainer"]
Adapters = Literal["all", "layers", "none"]

# The same scorer with another batch composition: its k3 against its plain self is the scorer's noise floor.
NOISE_FLOOR_VARIANT = "rebatched"
VARIANTS = ("", NOISE_FLOOR_VARIANT)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine in which a worker runs scorers, in a separate process. `packages` must be installed there.

    `remote`: the model is in a running server that the worker's configuration names. `keeps_memory`: it gives back a
    GPU's memory only when its process ends, so that other weights or options need another process.
    """

    name: str
    packages: tuple[str, ...]
    remote: bool = False
    keeps_memory: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the chain from the sampled to the trained log-probs.

    `cause` names what can differ between the score at the previous place and the score at this one: a short name, a
    colon and an explanation. It is empty at the first place.
    """

    name: str
    side: Side
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A scorer.

    Args:
        name: `engine.way` of a replay; a bare name of a score that the run logs.
        title: the computation in one line.
        colour: number of its colour in the pages' palette, from 1; used for lines and bars of the link that ends here.
        place: its place in the chain; None: the scorer is compared with `REFERENCE` only, or is the reference.
        engine: the engine in which a worker runs it; None: the run logs the score.
        implementation: `module:function` of the worker's code; None: logged.
        hidden_states: `module:function` of the worker's code that gives its hidden states by layer; None: it does not.
        routes: `module:function` of the worker's code that records the experts of each token; None: it cannot.
        by_default: scored by probes that name no scorer. False for one that costs as much as sampling did.
        adapters: the LoRA adapters that the implementation loads itself: all, those that change only dense layers, or
            none. Of others it gets the base model with the adapter merged in float32.
    """

    name: str
    title: str
    colour: int
    place: Place | None = None
    engine: str | None = None
    implementation: str | None = None
    hidden_states: str | None = None
    routes: str | None = None
    by_default: bool = True
    adapters: Adapters = "none"

    @property
    def side(self) -> Side | None:
        """The side of the chain that the scorer belongs to; None beside the chain."""
        return self.place.side if self.place is not None else None


@dataclass(frozen=True, slots=True)
class ExactPair:
    """Two scorers whose distributions a worker compares at each visited state, with the same weights.

    `target` gives π and `behaviour` μ. The engine of `target` must be torch and that of `behaviour` vLLM
    (`foreshock_probes.exact_divergence.pairs`).
    """

    target: str
    behaviour: str

    @property
    def key(self) -> str:
        """The comparison `target/behaviour` that is computed exactly: the pair's name in requests and tables."""
        return comparison_name(self.target, self.behaviour)

    @property
    def name(self) -> str:
        """The name in texts: `exact(target, behaviour)`."""
        return f"exact({self.target}, {self.behaviour})"


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("vllm", packages=("vllm",), keeps_memory=True),
        Engine("torch", packages=("torch", "transformers")),
        Engine("http", packages=("httpx",), remote=True),
    )
}

# In the order of the chain.
PLACES = (
    Place("logged by the engine", "engine"),
    Place(
        "engine decode",
        "engine",
        "engine sampling against replay: the engine sampled in another state "
        "(batching, caches, weights that changed or were not fully synchronised)",
    ),
    Place("engine prefill", "engine", "decode against prefill: the engine's two ways to compute the same token differ"),
    Place(
        "trainer forward pass",
        "trainer",
        "numerics between engine and trainer: kernels, precision and batching of the two forward passes",
    ),
    Place(
        "logged by the trainer",
        "trainer",
        "trainer against replay: a difference of the trainer that its replay does not reproduce "
        "(precision, dropout, masking, other weights)",
    ),
)
_LOGGED_BY_ENGINE, _DECODE, _PREFILL, _FORWARD, _LOGGED_BY_TRAINER = PLACES

_torch_forward = partial(
    Scorer,
    engine="torch",
    implementation="foreshock_probes.scorers.torch_forward:score",
    hidden_states="foreshock_probes.layer_divergence.torch_states:TorchStates",
    routes="foreshock_probes.routing.torch_routes:record",
    adapters="all",
)

# Of two scorers at one place, the first one is preferred.
SCORERS: dict[str, Scorer] = {
    scorer.name: scorer
    for scorer in (
        Scorer(
            name="rollout",
            title="log μ as the inference engine logged it at sampling time",
            colour=1,
            place=_LOGGED_BY_ENGINE,
        ),
        Scorer(
            name="vllm.decode",
            title="vLLM, forced through decode one token at a time",
            colour=6,
            place=_DECODE,
            engine="vllm",
            implementation="foreshock_probes.scorers.vllm_scorers:score_decode",
            by_default=False,
            adapters="layers",
        ),
        Scorer(
            name="vllm.prefill",
            title="vLLM, prompt and response in one prefill",
            colour=2,
            place=_PREFILL,
            engine="vllm",
            implementation="foreshock_probes.scorers.vllm_scorers:score_prefill",
            routes="foreshock_probes.routing.vllm_routes:record",
            hidden_states="foreshock_probes.layer_divergence.vllm_states:VllmStates",
            adapters="layers",
        ),
        Scorer(
            name="vllm.http",
            title="a running vLLM server, prompt and response in one prefill",
            colour=2,
            place=_PREFILL,
            engine="http",
            implementation="foreshock_probes.scorers.http_servers:score_with_vllm",
            by_default=False,
            adapters="layers",
        ),
        Scorer(
            name="sglang.http",
            title="a running SGLang server, prompt and response in one prefill",
            colour=2,
            place=_PREFILL,
            engine="http",
            implementation="foreshock_probes.scorers.sglang_http:score_prefill",
            routes="foreshock_probes.routing.sglang_routes:record",
            by_default=False,
        ),
        Scorer(
            name="sglang.decode",
            title="a running SGLang server, forced through decode one token at a time",
            colour=6,
            place=_DECODE,
            engine="http",
            implementation="foreshock_probes.scorers.sglang_http:score_decode",
            by_default=False,
        ),
        _torch_forward(
            name="torch.trainer",
            title="a torch forward pass set up as the trainer's (precision and master weights by its options)",
            colour=3,
            place=_FORWARD,
        ),
        Scorer(
            name="torch.own",
            title="the trainer's own forward pass, a function that the worker's configuration names",
            colour=3,
            place=_FORWARD,
            engine="torch",
            implementation="foreshock_probes.scorers.trainer_forward:score",
            by_default=False,
        ),
        Scorer(name="trainer", title="log π as the trainer logged it", colour=4, place=_LOGGED_BY_TRAINER),
        _torch_forward(
            name="torch.bfloat16", title="a torch forward pass, weights and activations in bfloat16", colour=6
        ),
        _torch_forward(
            name="torch.float32", title="a torch forward pass in float32, the reference of the side branch", colour=5
        ),
    )
}

ENTRY_POINT_GROUP = "foreshock.scorers"
_NAME = re.compile(r"[a-z0-9_]+\.[a-z0-9_]+")


def scorers_of(points: Iterable[importlib.metadata.EntryPoint]) -> tuple[dict[str, Scorer], tuple[str, ...]]:
    """Return the rows of other packages by name, and a sentence for each entry that was refused.

    An entry has the scorer's name and points to its row. The row's module is imported wherever the table is, so it must
    import its engine inside the function that scores. An entry that is broken or takes a name in use is refused without
    an error, because a trainer imports the table too; if two have one name, both are refused.
    """
    by_name: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append(point)
    rows: dict[str, Scorer] = {}
    refused: list[str] = []
    for name, same in sorted(by_name.items()):
        found = _row_of(name, same)
        if isinstance(found, Scorer):
            rows[name] = found
        else:
            origins = ", ".join(sorted(point.value if point.dist is None else point.dist.name for point in same))
            refused.append(f"the scorer {name!r} of {origins} is refused: {found}")
    return rows, tuple(refused)


def _row_of(name: str, points: Sequence[importlib.metadata.EntryPoint]) -> Scorer | str:
    """Return the row of an entry, or the reason why it is refused."""
    if name in SCORERS:
        return "Foreshock has a scorer of that name; rename the entry and its row"
    if len(points) > 1:
        return "several packages have a scorer of that name; remove all but one"
    if not _NAME.fullmatch(name):
        return "a name must be two words with a dot between them, such as 'torch.float64'"
    try:
        row = points[0].load()
    except Exception as error:
        return f"{points[0].value} cannot be imported: {type(error).__name__}: {error}"
    if not isinstance(row, Scorer):
        return f"{points[0].value} must be a foreshock.scorers.Scorer, got {type(row).__name__}"
    if row.name != name:
        return f"its row has the name {row.name!r}; both must be equal"
    if row.engine not in ENGINES:
        return f"its engine must be one of {', '.join(sorted(ENGINES))}, got {row.engine!r}"
    if not row.implementation or ":" not in row.implementation:
        return f"its implementation must be 'module:function', got {row.implementation!r}"
    return row


_ROWS, _REFUSED = scorers_of(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
# Rows of other packages come last, so that of two scorers at one place the built-in one is preferred.
SCORERS |= _ROWS
REFUSED_SCORERS: tuple[str, ...] = _REFUSED
"""Why scorers of other packages were refused, one sentence each; a worker does not start if there is one."""

EXACT_PAIRS: dict[str, ExactPair] = {
    pair.key: pair for pair in (ExactPair(target="torch.trainer", behaviour="vllm.prefill"),)
}

# The side branch compares every score with this one: the most exact forward pass that is affordable.
REFERENCE = "torch.float32"

ENGINE_DECODE = "vllm.decode"
"""The scorer that decodes as the engine sampled; `foreshock certify` compares it with prefill."""
OF_THE_USER = "torch.own"
"""The scorer that calls a function of the user's."""
ROUNDED = "torch.bfloat16"
"""A forward pass in pure bfloat16, whose difference from `REFERENCE` is the rounding of that type."""


def available_scorers() -> tuple[str, ...]:
    """Return the names of the scorers that this release implements."""
    return tuple(name for name, scorer in SCORERS.items() if scorer.implementation is not None)


def chain_of(names: Collection[str]) -> tuple[str, ...]:
    """Return one scorer for each place of the chain: the first of `names` there, else the first of the table."""
    at_places = [[scorer.name for scorer in SCORERS.values() if scorer.place == place] for place in PLACES]
    return tuple(next((name for name in there if name in names), there[0]) for there in at_places)


def default_scorers() -> tuple[str, ...]:
    """Return the scorers of a probe that names none: the first one by default at each place, and the reference."""
    available = tuple(name for name in available_scorers() if SCORERS[name].by_default)
    return (*(name for name in chain_of(available) if name in available), REFERENCE)


def main_comparisons() -> tuple[str, ...]:
    """Return the comparisons that pages and dashboards show, in the order of reading.

    They are the whole, the links between neighbours that a probe scores by default, and the reference against the
    replays of the engine and of the trainer.
    """
    scored = [name for name in CHAIN if SCORERS[name].engine is None or SCORERS[name].by_default]
    links = (comparison_name(later, earlier) for earlier, later in itertools.pairwise(scored))
    branch = (comparison_name(REFERENCE, name) for name in middle_of_chain(scored) if name is not None)
    return (TRAINER_ROLLOUT, *links, *branch)


def middle_of_chain(chain: Iterable[str]) -> tuple[str | None, str | None]:
    """Return the last scorer of the engine's side and the first of the trainer's; None if a side has none.

    Both are replays if there are any: replays are known to use the same weights as the reference.
    """
    scorers = [SCORERS[name] for name in chain if name in SCORERS]
    engine = [scorer.name for scorer in scorers if scorer.side == "engine"]
    trainer = [scorer.name for scorer in scorers if scorer.side == "trainer"]
    return (engine[-1] if engine else None), (trainer[0] if trainer else None)


def noise_floor_scorers(name: str) -> tuple[str, ...]:
    """Return the scorers whose noise floor stands for that of `name`, the best first.

    A replay has its own floor. A logged score cannot be computed twice: its noise is taken to be that of its replays.
    """
    scorer = SCORERS.get(name)
    if scorer is None or scorer.engine is not None:
        return (name,)
    return tuple(each.name for each in SCORERS.values() if each.engine is not None and each.side == scorer.side)


def cause_of_link(earlier: str, later: str) -> str:
    """Return what can differ between two scores of the chain.

    If scores between the two are missing, the result has the short names of all causes between them, a colon and every
    explanation: no cause is left out.
    """
    before, after = (SCORERS[name].place if name in SCORERS else None for name in (earlier, later))
    causes = []
    if before is not None and after is not None:
        causes = [place.cause for place in PLACES[PLACES.index(before) + 1 : PLACES.index(after) + 1]]
    if not causes:
        return f"any difference between {earlier} and {later}"
    if len(causes) == 1:
        return causes[0]
    parts = [cause.partition(": ") for cause in causes]
    short, explanations = [name for name, _, _ in parts], [explanation for _, _, explanation in parts]
    return (
        f"{', '.join(short[:-1])} or {short[-1]}: {'; or '.join(explanations)}; "
        "not told apart, because scores between these two are missing"
    )


def score_name(scorer: str, variant: str) -> str:
    """Return the name of a scorer's variant in a comparison: `vllm.prefill`, or `vllm.prefill@rebatched`."""
    return f"{scorer}@{variant}" if variant else scorer


def split_score_name(name: str) -> tuple[str, str]:
    """Return (scorer, variant) of a score's name; the plain variant is empty."""
    scorer, _, variant = name.partition("@")
    return scorer, variant


# The whole chain, with the preferred scorer at each place.
CHAIN = chain_of(())

_ENGINE_REPLAY, _TRAINER_REPLAY = middle_of_chain(CHAIN)
assert _ENGINE_REPLAY is not None
assert _TRAINER_REPLAY is not None
ENGINE_REPLAY: str = _ENGINE_REPLAY
"""The scorer that replays with the inference engine; the trainer's forward pass is compared with it."""
TRAINER_REPLAY: str = _TRAINER_REPLAY
"""The scorer that replays the trainer's forward pass."""
