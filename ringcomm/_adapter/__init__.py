"""Framework-independent code of the adapters. Imports no framework."""
