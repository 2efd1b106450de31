"""The public collectives, with handles, in groups, on objects; process sets; comparisons between ranks."""
