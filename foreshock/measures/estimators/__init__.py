"""From sums to measures: per-token formulas, means, confidence intervals, tail shapes and attribution to links."""
