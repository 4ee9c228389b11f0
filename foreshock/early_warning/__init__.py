"""Early warning: detectors over a run's closed steps, and the learning-rate advice. Pure functions of plain data.

schedule       the halving rule
surge          the online detector of the length surge; ``surge_settings``, ``surge_state``, ``surge_events``
noise          autocorrelated noise of a series; ``evidence``: the e-detector and the onset
reward         the detector of a falling reward
collapse       the definition of a collapse and of a hit
rules          threshold rules; ``default_rules`` has their numbers
detectors      one step of all detectors: ``advance(state, closed step, configuration) -> (state', events)``
advice_state   the append-only log of decisions, and the state that it folds to
decisions      new decisions by detectors, operators and resumed trainers
"""
