"""The reading calls, a module for each subject; `foreshock/reading/api.py` lists them."""
