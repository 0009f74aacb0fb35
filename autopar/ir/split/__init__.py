"""A program worked through in parts: microbatches of the batch, layers of a scan."""
