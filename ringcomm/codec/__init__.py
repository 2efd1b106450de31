"""Codecs: fewer bytes per element on the network."""
