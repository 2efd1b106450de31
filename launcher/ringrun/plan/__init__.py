"""What to run where: hosts, ranks, commands, environment, settings. Pure."""
