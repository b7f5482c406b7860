"""Ray at the edge: everything that knows how workers are started and called."""
