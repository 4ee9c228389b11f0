"""Backtest: recorded runs replayed row by row as if live, and what each rule would have warned of.

signals   names that trainers log, and the quantities of the detectors that they are
readers   files of recorded runs
replay    a run through the detectors: episodes of each rule
scoring   hits, misses, lead times and false alarms, with exact intervals
clocks    alarms that look at nothing, for comparison at an equal number of alarms
"""
