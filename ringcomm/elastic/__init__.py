"""Elastic training: state that survives a change of the job's ranks, and the loop that restarts from it."""
