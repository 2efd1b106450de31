"""The live view, the report and the metrics of a job, all from the same numbers."""
