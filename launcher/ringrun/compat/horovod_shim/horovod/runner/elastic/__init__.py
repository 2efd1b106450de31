"""Parts of Horovod's elastic launcher that scripts and tests import."""
