"""Connections of Foreshock to trainers, one module per framework. None is imported until it is used."""
