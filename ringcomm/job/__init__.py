"""A process in its job: entering, preparing, the context, and what is recorded of it."""
