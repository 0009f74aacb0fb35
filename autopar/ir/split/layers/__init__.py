"""Scans over layers in parts that stand in the program one behind the other."""
