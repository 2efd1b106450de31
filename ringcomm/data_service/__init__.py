"""The registry of processes that prepare data for a training job. No framework is needed for it."""
