"""Certificates: the result of `foreshock certify`, its verdicts, its comparison with another one, and its texts."""
