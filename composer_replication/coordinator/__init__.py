"""The coordinator: one process that hands out training samples to the replica groups of a run."""
