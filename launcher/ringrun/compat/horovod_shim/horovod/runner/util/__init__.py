"""Small helpers of Horovod's launcher that programs import."""
