"""Several passes over the microbatches, where samples wait for what all of them make together."""
