"""Presenters: they read the services of other nouns and return view models. No query is here."""
