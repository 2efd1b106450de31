"""Conversion between the caller's arrays and the flat arrays that are sent."""
