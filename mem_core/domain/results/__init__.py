"""Values of what a run comes to: figures of held-out rows, and model folders."""
