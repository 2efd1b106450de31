"""Connections to hosts: local processes, ssh, and the frames exchanged with agents."""
