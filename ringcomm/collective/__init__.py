"""Running schedules: the arithmetic and the one executor."""
