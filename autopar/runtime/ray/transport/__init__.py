"""Sends values from one worker to another."""
