"""The pass over the tokens of a batch that fills the statistics: a numpy reference and a compiled one."""
