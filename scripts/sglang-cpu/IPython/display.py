"""What SGLang imports of IPython, and calls in notebooks only."""

HTML = display = None
