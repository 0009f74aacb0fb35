"""Which operations run on which part of the machine: layers, stages, and what passes between them."""
