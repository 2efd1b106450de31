"""Collectives as data: the steps with which ranks send and receive, as pure functions without I/O."""
