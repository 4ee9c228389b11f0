"""Presenters: they call the services of other nouns and return view models; they contain no queries."""
