"""Predicts how a training step scales: a model of hosts, interfaces, a switch and the step itself."""
