"""Other launchers' interfaces: the package `horovod` that scripts import under ``--horovod``."""
