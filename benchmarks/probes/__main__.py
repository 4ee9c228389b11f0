"""Compare the scorers with bare engines: tokens per second, padding, peak memory. `make bench-probes`

Bars: vLLM through a worker's engine process scores at least 90 % of the tokens per second of bare `LLM.generate` with
prompt log-probs on the same batches. Torch scores at least 90 % of the tokens per second of a bare forward pass on the
same batches, sorted by length. At most 5 % of the tokens of these batches are padding. Of logits [T, V] in float32 less
than 1 % grows with vocabulary × tokens in the peak memory, beyond what each of the two adds alone.

Without a bar: the CPU time of a replay over that of sampling the same responses, from which docs/large-runs.md works
out a price.

Tokens per second are those of CPU time. Compared runs alternate; a ratio is the median of the ratios of neighbouring
runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.probes.memory import measure_memory
from benchmarks.probes.price import measure_price
from benchmarks.probes.speed import measure_torch, measure_vllm
from foreshock.hardware import cpu_name


def main() -> int:
    """Print the tables and a line of figures; return 1 if a bar is not reached."""
    print(cpu_name())
    figures: dict[str, float] = {}
    bars: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="foreshock-bench-probes-") as folder:
        for comparison in (*measure_torch(Path(folder)), measure_vllm(Path(folder))):
            print(comparison, flush=True)
            figures[f"{comparison.name}_ratio"] = comparison.ratio
            bars[f"{comparison.name}_ratio"] = comparison.ratio >= 0.9
            if comparison.padding is not None:
                figures[f"{comparison.name}_padding"] = comparison.padding
                bars[f"{comparison.name}_padding"] = comparison.padding <= 0.05
        for growth in measure_memory(Path(folder)):
            print(growth, flush=True)
            figures[f"{growth.name}_memory_growth"] = growth.ratio
            figures[f"{growth.name}_memory_product_share"] = growth.product_share
            bars[f"{growth.name}_memory_product_share"] = abs(growth.product_share) < 0.01
        price = measure_price(Path(folder))
        print(price, flush=True)
        figures |= {f"{name}_over_sampling": ratio for name, ratio in price.ratios.items()}
    missed = [name for name, reached in bars.items() if not reached]
    print(
        " ".join([*(f"{name}={value:.3f}" for name, value in figures.items()), f"missed={','.join(missed) or 'none'}"])
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
