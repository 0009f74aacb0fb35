"""What one worker does: it carries out its stream, and decides nothing."""
