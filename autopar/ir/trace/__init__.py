"""Traces the user's function to one flat program."""
