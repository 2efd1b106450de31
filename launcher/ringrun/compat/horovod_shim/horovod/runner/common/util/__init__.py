"""Small helpers of Horovod's launcher."""
