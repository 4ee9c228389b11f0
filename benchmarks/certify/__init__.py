"""The certificate's verdicts on planted changes, on pairs that are the same, and on repetitions."""
