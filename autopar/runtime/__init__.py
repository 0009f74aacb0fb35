"""Executes a plan; decides nothing."""
