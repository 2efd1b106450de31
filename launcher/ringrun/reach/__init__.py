"""How hosts are reached: local processes, ssh, and the frames exchanged with agents."""
