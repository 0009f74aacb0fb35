"""The user's process: starts the workers, hands them the streams, and waits with a limit."""
