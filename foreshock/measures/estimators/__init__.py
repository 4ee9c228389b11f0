"""From statistics to measures: per-token formulas, estimates, confidence intervals and the attribution to links."""
