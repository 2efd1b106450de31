"""The common modules of Horovod's bindings."""
