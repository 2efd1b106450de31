"""Elastic jobs: which hosts and processes a job has while it runs. Pure."""
