"""Backtest: recorded runs replayed row by row as if live, and what each rule would have warned of.

readers   files of recorded runs; event_files those of TensorBoard
replay    a run through the detectors: episodes of each rule
scoring   hits, misses, lead times and false alarms, with exact intervals
clocks    alarms that look at nothing, for comparison at an equal number of alarms
roc       the scores of every rule as its threshold moves
applied   what the advice would have cost in apply mode
result    all of it; page renders it as HTML
"""
