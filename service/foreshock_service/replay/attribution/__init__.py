"""Attribution: the causes of a step's mismatch, computed from its logged and its replayed scores."""
