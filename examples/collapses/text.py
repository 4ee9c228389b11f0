"""The parts of docs/collapses.md that do not depend on the results, except for the places in braces of the opening."""

from __future__ import annotations

from typing import Final

OPENING: Final = """
<!-- Written by python -m examples.collapses.analyse from examples/collapses/results. Do not edit. -->

# Collapses of tiny runs: a benchmark

How often, and when, does reinforcement learning collapse at a given training–inference mismatch and learning rate, and
which signals warn before it? Real, tiny runs (vLLM samples, torch trains) over a grid of doses of mismatch × learning
rates × seeds.

{progress}

```
nice -n 19 make collapses                     # make the runs that are missing; RUNS=10: the next ten
python -m examples.collapses.analyse          # write this page again
```

A step takes {command} so far. The policy is the model of `examples/tiny_rl` (0.34 M parameters), trained by RLOO and
AdamW **without a correction of the mismatch**. All mismatch is in the sampler:

- `none`: the trainer's own forward pass samples, and log μ equals log π bit for bit.
- `bf16`: vLLM in bfloat16 with the trainer's weights; the doses below are on top of it.
- `w8`, `w6`, `w4`: every weight matrix is rounded to so many bits.
- `lag…`: the engine holds the trainer's weights of so many steps ago. `partial`: its output head is never updated.
- `kv-fp8`: vLLM's 8-bit key-value cache (e4m3, scale 1).
"""

CLOSING: Final = """
## What tiny models cannot tell about large ones

Compare the order of doses and of signals, not the thresholds: learning rates are a hundred times those of large runs.
Responses of 20 tokens judge no rule about lengths, and 150 steps show no slow harm. There is no mixture of experts,
whose routing is the largest known source of mismatch, and no reward that can be gamed.
"""
