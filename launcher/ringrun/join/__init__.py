"""Machines that join a job with a code: invitations, the proof of the code, and the agent's connection."""
