"""Jobs of probe workers: the price of other weights, and what kills of workers leave behind. `make bench-jobs`"""
