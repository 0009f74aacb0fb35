"""Instruction streams: what each mesh does in one step, ordered by a schedule, checked and simulated."""
