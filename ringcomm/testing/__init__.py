"""Tools to test programs and transports with: many ranks in one process, without any launcher."""
