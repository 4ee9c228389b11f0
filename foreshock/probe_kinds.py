"""The table of kinds of probes: what a request may ask for, what a worker must offer, and which code does the job.

The service, the worker and `foreshock probe` read it. To add a kind, add its row here, the worker's code that the row
names, and a row of `DOCUMENTS` in `service/foreshock_service/replay/results/documents.py` for its result.
"""

from dataclasses import dataclass

from foreshock.scorers import ENGINE_REPLAY, EXACT_PAIRS, REFERENCE, SCORERS, TRAINER_REPLAY

DOCTOR_SECONDS = 600.0
"""The default time for the replays of an examination."""
DOCTOR_CANDIDATES = 8
"""The default number of earlier announced checkpoints that an examination tries."""

_WORDS = {1: "one scorer", 2: "two scorers"}


@dataclass(frozen=True, slots=True)
class ProbeKind:
    """A kind of probe.

    Args:
        name: `kind` of a request, the end of the address of its result (sent and read), and its flag of
            `foreshock probe`.
        noun: the name of a request in errors.
        job: `module:function` of the worker's code that does a job of this kind.
        capability: what a worker must offer besides its scorers; empty: scoring is enough.
        scorers: the number of its scorers, whose order counts; None: any number.
        default_scorers: the scorers of a request that names none.
        able: the field that a scorer's row must have; None: every scorer can be used.
        unable, can: the words in errors for a scorer without that field, and for the scorers with it.
        has_variants: a request may name variants of its scorers.
        rollouts, most_rollouts: the default and the largest sample of rollouts; None: all, no limit.
        sends_scores: its workers send the log-probs of its scorers, which are part of the run's chain.
        meaning: what it does, for the API.
        help: what its flag does.
        report: `module:function` that returns the lines of its result, given the answer and the probe; empty: it is in
            the report of the attribution.
    """

    name: str
    noun: str
    job: str
    capability: str = ""
    scorers: int | None = None
    default_scorers: tuple[str, ...] = ()
    able: str | None = None
    unable: str = ""
    can: str = ""
    has_variants: bool = False
    rollouts: int | None = None
    most_rollouts: int | None = None
    sends_scores: bool = True
    meaning: str = ""
    help: str = ""
    report: str = ""

    def usable_scorers(self) -> tuple[str, ...]:
        """Return the names of the scorers that a request may name."""
        return tuple(
            name
            for name, scorer in SCORERS.items()
            if scorer.implementation is not None and (self.able is None or getattr(scorer, self.able) is not None)
        )

    def flag_help(self) -> str:
        """Return the help of its flag, with the defaults."""
        if self.able is None:
            return self.help
        return (
            f"{self.help} (default: {', '.join(self.default_scorers)}; scorers that {self.can}: "
            f"{', '.join(self.usable_scorers())}), of {self.rollouts} rollouts unless --max-rollouts says otherwise"
        )

    def check(self, scorers: int, exact_pairs: int, *, with_variants: bool) -> None:
        """Raise ValueError unless a request may have this many scorers and exact pairs."""
        if self.scorers is None:
            return
        if scorers != self.scorers or exact_pairs or (with_variants and not self.has_variants):
            variants = "" if self.has_variants else ", no variant"
            raise ValueError(f"{self.noun} has {_WORDS[self.scorers]}{variants} and no exact pair")

    def sample(self, asked: int | None) -> int | None:
        """Return the rollouts of a request that asks for `asked` (None: the default). Raises ValueError if too many."""
        rollouts = self.rollouts if asked is None else asked
        if rollouts is not None and self.most_rollouts is not None and rollouts > self.most_rollouts:
            raise ValueError(f"{self.noun} has at most {self.most_rollouts} rollouts, got {rollouts}")
        return rollouts


EXACT = ProbeKind(
    name="exact",
    noun="a probe",
    job="foreshock_probes.job_scoring:score",
    has_variants=True,
    meaning="with the weights that sampled the step",
    help="also compute the divergence of "
    + ", ".join(f"{pair.target} and {pair.behaviour}" for pair in EXACT_PAIRS.values())
    + " over the whole vocabulary at each token",
)
DOCTOR = ProbeKind(
    name="doctor",
    noun="an examination by the doctor",
    job="foreshock_probes.doctor.job:run_job",
    capability="doctor.examine",
    scorers=1,
    default_scorers=(REFERENCE,),  # whose engine makes the replays
    rollouts=256,
    most_rollouts=4096,
    sends_scores=False,
    meaning="find the change of weights, sampling or forward pass that reproduces what was logged",
    help="find the change of weights, sampling or forward pass that reproduces what was logged",
    report="foreshock.doctor.findings:lines_of_answer",
)
LAYERS = ProbeKind(
    name="layers",
    noun="a comparison by layer",
    job="foreshock_probes.layer_divergence.states:run_job",
    capability="layers.compare",
    scorers=2,
    default_scorers=(TRAINER_REPLAY, REFERENCE),  # the second one is the reference
    able="hidden_states",
    unable="gives no hidden states to compare by layer",
    can="do",
    rollouts=64,  # it runs each scorer twice, without their log-probs
    sends_scores=False,
    meaning="compare the hidden states of two scorers layer by layer",
    help="compare the hidden states of two scorers layer by layer, the second --scorer being the reference",
    report="foreshock.commands.report_probes:layers_of_answer",
)
ROUTING = ProbeKind(
    name="routing",
    noun="a comparison of routed experts",
    job="foreshock_probes.routing.recorded:run_job",
    capability="routing.compare",
    scorers=2,
    default_scorers=(TRAINER_REPLAY, ENGINE_REPLAY),  # π, then μ
    able="routes",
    unable="cannot record routed experts",
    can="can",
    has_variants=True,
    rollouts=64,
    most_rollouts=1024,
    sends_scores=False,
    meaning="compare the routed experts of two scorers of a mixture of experts",
    help="compare the routed experts of two scorers of a mixture of experts, the first --scorer giving π, the second μ",
    report="foreshock.commands.report_probes:routing_of_answer",
)

PROBE_KINDS: dict[str, ProbeKind] = {kind.name: kind for kind in (EXACT, DOCTOR, LAYERS, ROUTING)}
