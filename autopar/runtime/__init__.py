"""Carry a plan out; decide nothing."""
