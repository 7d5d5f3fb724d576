"""Simulated nodes and agents over the real protocols, for demos, tests and benchmarks."""
