"""The names that SGLang imports from IPython and calls only in notebooks."""

HTML = display = None
