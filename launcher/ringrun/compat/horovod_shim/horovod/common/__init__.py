"""What Horovod's bindings have in common."""
