"""The answers of the API, one dataclass each: the service serves them, readers and operators return them.

Times are UTC microseconds. A number that cannot be estimated is NaN in Python and null in JSON.
"""
