"""The user's process: starts the workers, sends them the streams, and waits for them, with a time limit."""
