"""Pictures of a plan, one file each: frozen facts in, a piece of HTML out."""
