"""What went wrong: the first failure, which rank waits for which, and the report that the user reads."""
