"""The calls of an operator, a module for each subject; `foreshock/operating/api.py` lists them."""
