"""The live view and the report of a job, from the same counters."""
