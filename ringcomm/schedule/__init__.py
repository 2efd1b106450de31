"""Collectives as data: who sends what to whom, step by step, without a socket in sight."""
