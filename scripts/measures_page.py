"""Write docs/measures.md from the registry: `python -m scripts.measures_page`; `--check` says whether it is current.

The tables are foreshock/measures/registry.py and conditions.py, put in order; the words between them are here.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from foreshock.measures.registry import MEASURES, Measure
from foreshock.measures.statistics.conditions import CONDITIONS, Condition

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measures.md"

INTRODUCTION = """\
# Measures

Generated from `foreshock/measures/registry.py` by `python -m scripts.measures_page`: change it there.

μ is the policy that sampled, π the one that is trained. Per token `d = log π − log μ` and `ρ = exp(d)`. A comparison
is written `target/behaviour`, π over μ. Expectations are over tokens or sequences drawn from μ. What the numbers mean
for a run, and which are healthy, is in [reading-the-numbers.md](reading-the-numbers.md).

## How to read a line

**Direction.** KL(μ‖π) and χ²(μ‖π) are large where π gives little to what μ samples; χ²(π‖μ), ESS and clip fractions
are large where π gives much to what μ seldom samples. A mismatch in one direction hardly shows in the measures of the
other: at d = −10 a token adds 9 to Σ k3, at d = +10 it adds 22 015. Raw tails do not say which way it goes either,
since symmetric noise sampled from μ already gives P(d < −τ)/P(d > τ) ≈ e^τ: read `tail_asymmetry`.

**Aggregation.** A token mean is a sum over tokens divided by the number of tokens, over model-generated tokens,
before any filtering by reward. A mean of per-sequence means carries `_seq_mean` and is biased, because length is a
stopping time: where μ stops with probability 0.05 and π with 0.06, the KL is 9.4e-4 and the token mean of ρ is 1.000,
but the sequence mean of ρ is 1.023 and the log-perplexity difference has the wrong sign.

**Arithmetic.** Everything is float64, sums are compensated, and k3 is `expm1(d) − d`; near d = 0 it is its series,
because even in float64 that difference loses a digit for every factor of ten that d is below 1. In float32,
`exp(d) − d − 1` is off by a factor of two for k3 below about 1e-7, and a tenth to a fifth of its values are negative.
Counts are integers, the same for any merge order of shards.

**Empty (NaN; `null` in JSON)** means "not estimable", never 0: no token was measured; fewer than two prompt groups
for an interval, fewer than five for a bootstrap; `ess_seq` where 2·KL·T > ln N, because a sample of N cannot show
less than 1/N; `pareto_k` with fewer than five values in the tail; anything that needs entropies or advantages that
were not logged. NaN and infinite log-probs are counted apart and kept out of every mean.
"""

FRAMEWORKS = """\
## In another framework

A trainer holds padded tensors and a mask. All measures of a step, from these, without a service:

```python
from foreshock.measures import measure_step
from foreshock.rollouts import RolloutBatch

rollouts = RolloutBatch.from_padded(
    responses,
    response_mask,
    rollout_log_probs=rollout_log_probs,
    trainer_log_probs=old_log_probs,
    group_ids=prompt_ids,
)
measurement = measure_step(rollouts)
metrics = measurement.step.measures() | measurement.comparisons["trainer/rollout"].measures()
```

`pip install foreshock` brings numpy and pyarrow, no torch. With `foreshock[fast]`, call
`foreshock.measures.passes.compiled.prepare()` once in a process: from then on the same lines take machine code.

| argument | what |
| --- | --- |
| `responses`, `response_mask` | [N, L] token ids, and 1 where the model sampled; prompts may stand in front |
| `rollout_log_probs`, `trainer_log_probs` | [N, L] log μ as the engine logged it, and log π |
| `group_ids` | [N] the prompt of each rollout, strings or whole numbers; without it each rollout is a cluster |
| `entropy` | [N, L] of μ, in nats |
| `advantage`, `reward` | [N, L] or [N]; [N] |
| `turn`, `weights_version` | [N, L] or [N]; lag needs `attributes=BatchAttributes(trainer_weights_version=…)` too |
| `response_padding_mask` | [N, L] 1 for tokens: where a response begins or ends with a tool's, or has padding in it |
| `prompt_token_ids`, `prompt_padding_mask` | [N, P] for the length of prompts |

Arrays are numpy's or torch's: on a device, in bfloat16, part of a graph; padded left or right. What stands in padding
is never looked at. A row whose mask is 0 everywhere is a rollout of no tokens. A log-prob above 0, a shape that does
not fit or a mask that is none is an `InvalidRolloutsError` with its row and column. Where rows are lists,
`RolloutBatch.from_lists` takes them; jagged tensors go into `from_arrays` with their offsets. The names elsewhere:

| | token ids, mask | log μ | log π |
| --- | --- | --- | --- |
| verl | `responses`, `response_mask` | `rollout_log_probs` | `old_log_probs` |
| TRL | `completion_ids`, `completion_mask` | `sampling_per_token_logps` | `old_per_token_logps` |
| NeMo-RL | `input_ids`, `token_mask * sample_mask[:, None]` | `generation_logprobs` | `prev_logprobs` |

**Ranks.** What each measured of its own rollouts folds into what one process would have measured of all, in any order.
Sums travel, about 100 kB, and a row a rollout; no tokens:

```python
import torch.distributed as dist
from foreshock.measures import fold

of_ranks = [None] * dist.get_world_size()
dist.all_gather_object(of_ranks, measurement)
of_step = fold(of_ranks)
```

A group id must mean the same prompt on every rank. Where objects cannot be sent, `to_bytes` and `from_bytes` of
`measurement.step`, `comparison.statistics` and `comparison.summaries` do it without pickle; `fold` takes these
statistics as well, and `RolloutSummaries.concat` the rows. Either way, of the sums by token id those 512 travel that
matter most.

The same objects give the tables by condition (`comparison.statistics.condition_table("position")`), by token id
(`.token_id_table()`), what corrections would do (`foreshock.corrections.evaluate_usual(comparison.statistics,
comparison.summaries)`), and what is wrong with the columns (`foreshock.lint.lint_batch(rollouts)`).
"""

INTERVALS = """\
Tokens of a rollout depend on each other, and so do rollouts of one prompt. Intervals are of 95 % and cluster by
prompt group (`group_id`; a rollout without one is a cluster by itself): for m = ΣS/ΣT the residuals are e_g = S_g −
m·T_g. On real runs the standard error of k3 is 1.05 times that of independent tokens by sequence, and 1.3 to 1.8
times by group.

| columns | kind | made from |
| --- | --- | --- |
| `…_low`, `…_high` | Student's t with G − 1 degrees of freedom; symmetric | mergeable sums: always there |
| `…_bootstrap_low`, `…_bootstrap_high` | bootstrap-t over groups, 999 resamples, fixed seed | a row per rollout |

k3, χ² and TV are never negative, and neither are the ends of their intervals: a lower end of 0 says that no mismatch
would fit as well.

**Which to read.** `benchmarks/coverage.py` asks both against exact values. Over 2,000 batches of 128 prompts × 8
rollouts at three levels of mismatch, for k3, χ² and TV, the bootstrap-t holds them 93.7 to 95.5 times in 100 and
Student's t 93.8 to 95.2 times. They part where few tokens, prompts or groups make the mean;
`benchmarks/heavy_tails.py` shows by how much. From its table (`benchmarks/results/heavy_tails.txt`):

- TV is bounded by 1: either interval, they hold it 92 to 97 times in 100 whatever the tails.
- k3 and χ²: the bootstrap-t, where there is one. It is nowhere worse than sampling error, and better where groups are
  few, prompts uneven or tails heavy: for k3 by up to ten points. Student's t then misses on one side only, the truth
  lying above its upper end.
- Where `pareto_k` is above about 0.25, both are too short for k3 and χ², and both sit too low. Below, the bootstrap-t
  held k3 92.9 to 96.7 times in 100 on every policy that was tried, and χ² the same on all but one (86). Above, it held
  k3 85 to 96 times (Student's t 75 to 96), and χ² 20 to 90 times (Student's t 13 to 88). The error of χ² needs the
  fourth moment of ρ, so k < ¼, and so does that of k3 where d is small. Read the mean and the lower end as lower bounds
  there; pool steps, or use exact divergences, to know more.
- Where d reaches 1 as well (`max_d`), k = 0.5 is where the variance of ρ becomes infinite: χ² and ESS are then
  properties of the sample, and from 0.7 so is any importance-weighted mean. Where ρ stays near 1, a large `pareto_k`
  speaks of the tail of d alone and does these no harm.
- An upper end many times the mean, which runs of 8 prompts a step often have, is no error: so few groups, of which one
  or two make the mean, cannot bound it. Pool steps.
- `pareto_k` sees only the tail that the batch holds. A low one in a single batch is no proof: look at the highest of
  neighbouring steps.
"""

CONDITIONAL = """\
Beside its means a comparison has tables by condition: tokens, Σ|d|, Σd, Σk3, Σ|π − μ| and the largest |d|. Edges are
fixed, so that tables of any two batches merge: a bucket holds its lower edge and not its upper; the first and last take
what lies beyond. By token id the sums are exact while a part is in memory; of a part that is stored, the 512 ids that
may hold the most Σk3 are kept, with a bound of what any other may hold.
"""

TRAPS = """\
## Traps

- **Raw log-probs hide truncation and temperature.** Sampled with top-p 0.9, a logged *processed* μ gives a mean ρ of
  0.902; a logged *raw* μ, vLLM's default, gives 1.0000, and every ratio looks perfect. Only `surprisal_z` sees it,
  and it needs entropies. Record the mode.
- **Clamped metrics cannot fire.** ESS and the standard deviation of weights clamped to [½, 2] are bounded by 0.64 and
  0.75: alarms at 0.3 and 1 are dead. Nothing is clamped here, verl's measures included.
- **Sequence weights hold no information at ordinary mismatch.** ESS of sequences is about exp(−2·KL·T): a KL of
  6.4e-4 at 8,192 tokens gives 3e-5. `ess_seq_predicted` says so where `ess_seq` is empty.
- **Geo-RS is not length-invariant.** The logarithm of the geometric ratio has the mean −KL and the standard deviation
  √(2·KL/T): bounds of ±0.1 % are a gate on KL ≈ 1e-3, harder for long responses.
- **Differences of probabilities hide rare tokens**: log-probs of −5 against −15 differ by 0.0067.
- **Half of k3 can sit in a thousandth of the tokens.** Read the bootstrap interval and `pareto_k`.
- **k3 falls with entropy as a healthy run goes on.** `k3_kl_per_entropy` is far steadier; keep both.
- **Noise floors are halved before they are subtracted.** An engine scored twice has k3 = σ², of which σ²/2 is in
  trainer/rollout; the difference is never clamped at 0.
- **k3 of links does not add**, and away from the first link it is no KL under μ. The shares E[d_link·d]/E[d²] add to
  1.
- **A pad id that the model itself sampled** and the trainer's mask drops, a shift by one token, and a wrong mode are
  the usual false mismatches; a difference of exactly 0 everywhere means that π was copied from μ. `foreshock
  selfcheck` looks for them.
- **A mask rate is no health metric.** It can fall while the gap widens.
- **Staleness is not numerics.** Compare at equal lag. Dropout in the trainer alone makes a KL of 0.30 at a rate of
  0.1.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, what to know before its table, and which measures are in it."""

    title: str
    words: str
    holds: Callable[[Measure], bool]


def named(*names: str) -> Callable[[Measure], bool]:
    """Whether a measure's name is one of these, or begins with one of them that ends in `*`."""
    starts = tuple(name[:-1] for name in names if name.endswith("*"))
    return lambda measure: measure.name in names or measure.name.startswith(starts)


_WITH_SEQUENCE_MEAN = {measure.name.removesuffix("_seq_mean") for measure in MEASURES if "_seq_mean" in measure.name}

# A measure stands in the first section that holds it.
SECTIONS: tuple[Section, ...] = (
    Section("Of the step", "Of all rollouts of a step, whatever is compared.", lambda measure: measure.kind == "step"),
    Section(
        "Divergences and ratios",
        "Estimators by token, averaged over tokens.",
        lambda measure: measure.name in _WITH_SEQUENCE_MEAN,
    ),
    Section("Intervals", INTERVALS, lambda measure: measure.name.endswith(("_low", "_high"))),
    Section(
        "Size of d",
        "Quantiles come from fixed logarithmic counts and are within about 1 %; below 2^−27 = 7.5e-9 they are given as "
        "0, above 128 as 128. Extremes are exact.",
        named("mean_abs_d", "rms_d", "p50_abs_d", "p90_abs_d", "p99_abs_d", "p999_abs_d", "max_abs_d", "min_d", "max_d",
              "zero_fraction"),
    ),
    Section(
        "Tails",
        "Tails are cut on d itself, so they are the same on every machine. `F(2) > 0.1` is dangerous. "
        "The generalised Pareto shapes are scale-free: for small d they are about the shape of d's own tail.",
        named("tail*", "pareto_k*"),
    ),
    Section(
        "Weights and bounds",
        "Effective sample sizes are fractions, unclamped, in logarithms.",
        named("ess*", "pinsker_tv_bound"),
    ),
    Section("Differences of probabilities", "They hide rare tokens.", named("rollout_probs*", "rollout_actor_probs*")),
    Section(
        "With entropies",
        "Empty where entropies were not logged. `surprisal_z` is about standard normal where the logged μ is the law "
        "that sampled; a raw μ reaches 5 after some 200 independent tokens under top-p 0.9, 100 at temperature 0.8, "
        "2,600 at 0.95. By its making it lies within ±√G of G groups: no alarm at 5 can fire with fewer than 26.",
        named("surprisal_z", "k3_kl_per_entropy"),
    ),
    Section(
        "With advantages",
        "Empty where advantages were not logged. A token's advantage is its own, or that of its rollout.",
        named("advantage*", "bad_update_fraction"),
    ),
    Section(
        "Means of per-sequence means",
        "For comparison with what others report; biased, see above.",
        lambda measure: measure.name.endswith("_seq_mean"),
    ),
    Section(
        "Of sequences",
        "Of whole responses. Those of verl keep verl's names: `training` is π, `rollout` is μ.",
        lambda measure: measure.kind == "sequence",
    ),
    Section("Counts", "Integers, the same for any merge order.", lambda measure: measure.column_type == "integer"),
)  # fmt: skip

HEAD = ("measure", "per token, sequence or rollout", "unit", "direction", "aggregation", "source", "kind")


def sections() -> list[tuple[Section, list[Measure]]]:
    """Every measure of the registry in its section; raises LookupError for one that no section holds."""
    found: dict[str, list[Measure]] = {section.title: [] for section in SECTIONS}
    for measure in MEASURES:
        home = next((section for section in SECTIONS if section.holds(measure)), None)
        if home is None:
            raise LookupError(f"{measure.name} stands in no section of the page of measures")
        found[home.title].append(measure)
    ordered = [*SECTIONS[1:], SECTIONS[0]]
    return [(section, found[section.title]) for section in ordered]


def line_of(measure: Measure) -> str:
    """A measure's line of its table."""
    name = f"`{measure.name}`"
    if measure.column != measure.name:
        name += f", column `{measure.column}`"
    kind = measure.kind if measure.column_type == "float" else f"{measure.kind}, integer"
    return row(name, measure.formula, measure.unit, measure.direction, measure.aggregation, measure.source, kind)


def row(*cells: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(head: tuple[str, ...], lines: Iterable[str]) -> list[str]:
    """The lines of a table, a blank one after it."""
    return [row(*head), "|" + " --- |" * len(head), *lines, ""]


def condition_line(condition: Condition) -> str:
    """A condition's line: what it is and how its buckets are cut."""
    inner = [edge for edge in condition.edges if math.isfinite(edge)]
    span = f"{inner[0]:g} … {inner[-1]:g}"
    return row(f"`{condition.name}`", condition.meaning, condition.unit, str(condition.size), span)


def anchor(title: str) -> str:
    """The name of a heading in links."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")


def page() -> str:
    """What docs/measures.md is to contain."""
    found = sections()
    contents = [f"- [{section.title}](#{anchor(section.title)}) ({len(measures)})" for section, measures in found]
    lines = [INTRODUCTION, FRAMEWORKS, "## Contents", "", f"{len(MEASURES)} measures.", "", *contents]
    lines += ["- [By condition](#by-condition)", "- [Traps](#traps)", ""]
    for section, measures in found:
        lines += [f"## {section.title}", "", section.words.rstrip("\n"), "", *table(HEAD, map(line_of, measures))]
    head = ("condition", "what", "unit", "buckets", "edges")
    conditions = table(head, map(condition_line, CONDITIONS.values()))
    lines += ["## By condition", "", CONDITIONAL, *conditions, TRAPS]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the page is not current")
    if parser.parse_args().check:
        current = PAGE.exists() and PAGE.read_text() == page()
        if not current:
            print(f"not current: {PAGE}; run python -m scripts.measures_page", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
