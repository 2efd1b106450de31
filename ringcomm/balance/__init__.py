"""Ranks of unequal speed: how many samples of a global batch each of them gets."""
