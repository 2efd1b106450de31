"""Sending packages to hosts: ringcomm itself, wheels, and the user's code."""
