"""Golden results: everything that the service says of recorded runs, compared with what an earlier revision said."""
