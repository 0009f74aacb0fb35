"""The loop over microbatches: what runs before it, in it and behind it, and how a microbatch is written."""
