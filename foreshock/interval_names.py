"""What intervals are called. Sentences, pages, the report and the API use these words.

None is called a 95 % interval. The range holds the mean of the run's prompts nearly that often where prompts are alike,
but in 16 % of the batches of 8 prompts, and 43 % of those of 32, where one prompt in 50 has ten times the |d|
(`benchmarks/coverage.py`). No number of a batch tells these cases apart: the tail shape k̂ is low in just the batches
that lack the heavy prompt.
"""

from __future__ import annotations

RANGE = "range over the prompts"
RANGE_NOTE = (
    f"A {RANGE} resamples the prompts of the batch. What is too rare to be among them is not in it: it is no bound on "
    "the mean of the run."
)
