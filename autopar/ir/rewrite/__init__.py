"""Rewrites a program to canonical forms: the same function, easier to shard and to cut."""
