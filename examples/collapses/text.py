"""The parts of docs/collapses.md that do not depend on the results, except for the places in braces of the opening."""

from __future__ import annotations

from typing import Final

OPENING: Final = """
<!-- Written by python -m examples.collapses.analyse from examples/collapses/results. Do not edit. -->

# Collapses of tiny runs: a benchmark

How often, and when, does reinforcement learning collapse at a given training–inference mismatch and learning rate, and
which signals warn before it? This benchmark makes many real, tiny runs (vLLM samples, torch trains) over a grid of
doses of mismatch × learning rates × seeds, and keeps every step's measures.

{progress}

```
nice -n 19 make collapses                     # make the runs that are missing; end it at any time, call it again
nice -n 19 make collapses RUNS=10             # the next ten
python -m examples.collapses.analyse          # write this page again
```

A step takes {command} so far, on a machine that did other work beside it. A run is a Parquet file in
`examples/collapses/results`: a row a step, a column a measure by the detectors' names, and settings, versions and
fingerprints in the metadata.

The policy is the model of `examples/tiny_rl` (Qwen3 architecture, 0.34 M parameters). Its warmed-up weights are in
`examples/collapses/start`: it writes running sums or guesses at once, half of the time each, and is right in about
45 % of cases. RLOO, AdamW, gradient norm clipped at 1, and **no correction of the mismatch**. All mismatch is in the
sampler:

- `none`: the trainer's own forward pass samples, by Gumbel-max with noise fixed in advance, and log μ equals log π bit
  for bit (checked at every step). vLLM's samples with the trainer's numbers logged as μ would show d = 0 too, but
  the tokens would still come from another distribution.
- `w8`, `w6`, `w4`: every weight matrix is rounded to nearest, symmetric, with a scale for each row, then loaded.
- `lag…`: the engine holds the trainer's weights of so many steps ago. `partial`: its output head is never updated.
- `kv-fp8`: vLLM's own 8-bit key-value cache (e4m3, scale 1), on CPUs with AVX-512.
"""

CLOSING: Final = """
## What tiny models cannot tell about large ones

- **Which k3 is safe.** A model of three layers with 16 tokens in its vocabulary, 64 responses a step and at most 150
  updates learns under other noise than a large model. The dose at which collapses begin here is no threshold for
  another model; only the order of doses and the order of signals can be compared.
- **Lengths.** Responses have at most 20 tokens. Sequence-level ratios, which grow with length, hardly matter here, and
  a length surge has no room. No rule about lengths can be judged by these runs.
- **Learning rates.** They are a hundred times those of large runs (1e-6 is usual there) and more, and a run is 150
  steps. A mismatch that harms slowly, over thousands of steps, is not seen.
- **Routing.** There is no mixture of experts, whose routing is the largest known source of mismatch.
- **The doses are not alike.** Lag is a difference of policies, rounding one of numerics; equal k3 need not mean equal
  harm, and the table by k3 mixes them.
- **The reward** is exact arithmetic. A reward that can be gamed collapses in other ways.
- What can be carried over is the method: labels fixed before the runs, a mismatch collapse only if the twin without
  mismatch survives, and a locked part that no rule was tuned on.
"""
