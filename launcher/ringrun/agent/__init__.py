"""On each host: the agent that starts and ends the ranks there, and what it is sent along with."""
