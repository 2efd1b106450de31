"""The explanation of failures: the first failure, which rank waits for which, and the user's report."""
