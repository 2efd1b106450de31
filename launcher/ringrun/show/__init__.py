"""What the user sees: output of ranks, lines, files, tables."""
