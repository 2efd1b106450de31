"""A process in its job: entering, preparing, the context, and the records of it."""
