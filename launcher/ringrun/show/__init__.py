"""The launcher's output: lines of ranks, files, messages, tables."""
