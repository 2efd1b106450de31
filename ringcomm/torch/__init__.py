"""ringcomm for PyTorch."""
