"""ringrun: starts the ranks of a job on this and other hosts, monitors them, and ends all their processes."""
