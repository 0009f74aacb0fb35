"""One worker: executes its stream, and decides nothing."""
