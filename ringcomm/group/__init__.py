"""Ranks that exchange messages with each other: messages, matching, and aborting of waits."""
