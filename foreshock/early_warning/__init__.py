"""Early warning: detectors over a run's closed steps, and the learning-rate advice. Pure functions of plain data.

schedule       the halving rule
surge          the online detector of the length surge
rules          threshold rules; ``default_rules`` has their numbers
detectors      one step of all detectors: ``advance(state, closed step, configuration) -> (state', events)``
advice_state   the append-only log of decisions, and the state that it folds to
decisions      new decisions by detectors, operators and resumed trainers
"""
