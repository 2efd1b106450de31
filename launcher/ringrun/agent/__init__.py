"""The agent, which starts and ends the ranks of one host, and the modules that are sent with it."""
