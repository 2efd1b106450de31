"""Ranks that exchange messages with each other: messages, matching, and what ends a wait."""
