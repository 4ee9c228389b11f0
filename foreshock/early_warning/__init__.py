"""Early warning: what a run's closed steps say, and what follows for its learning rate. Pure functions of plain data.

schedule    the halving rule
surge       the online detector of the length surge
rules       threshold rules; ``default_rules`` has their numbers
detectors   one step of all of them: ``advance(state, closed step, configuration) -> (state', events)``
decisions   the append-only log of advice, and the state that it folds to
"""
