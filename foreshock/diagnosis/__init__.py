"""The judgement of a run: detectors and rules over its closed steps, and sentences about its numbers.

Pure functions of plain data:

detectors       one step of all detectors: ``advance(state, closed step, configuration) -> (state', events)``
rule            a threshold rule and its event; ``rules`` advances them
default_rules   the rules that every run has; ``mismatch_rules`` has those on the mismatch
rule_files      the file of rules
surge           the detector of the length surge; ``surge_state`` has its settings, state and events
reward          the detector of a falling reward, and the definition of a collapse
statistics      noise, intervals and the e-detectors
quantities      the names that trainers log
diagnose        the one judge: a run's history becomes its diagnosis
conclusion      a sentence on a step's attribution; ``attribution`` makes all of them
"""
