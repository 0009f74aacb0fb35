"""Executes a plan on a Ray cluster: one actor per host and stage mesh."""
