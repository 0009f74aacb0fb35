"""Rows that are sorted by a key (experts without capacity), sorted in equal parts where no reader can tell."""
