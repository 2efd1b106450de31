"""State that survives a change of the job's ranks, and the loop that starts again from it."""
