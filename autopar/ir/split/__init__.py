"""One axis, whichever it is: placements, strategies, solver, demand and writer; a room for each use of them."""
