"""What the adapters share: everything about them that is not a framework's affair. Imports none."""
