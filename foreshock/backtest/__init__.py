"""Backtest: recorded runs replayed row by row as if live, and what each rule would have warned of.

readers   files of recorded runs, those of TensorBoard among them
replay    a run through the detectors: episodes of each rule, and what the advice would have cost in apply mode
scoring   hits, misses, lead times and false alarms of each rule
"""
