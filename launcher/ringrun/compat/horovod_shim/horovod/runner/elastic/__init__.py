"""The discovery of hosts."""
