"""How values get from one worker to another."""
