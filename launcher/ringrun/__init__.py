"""ringrun: starts the ranks of a job here and on other hosts, watches them, and leaves nothing behind."""
