"""Carry a plan out on a Ray cluster: one actor per host and stage mesh."""
