"""A module that Horovod's own tests import."""
