"""The plan of a job: hosts, ranks, commands, environment, settings. Pure."""
