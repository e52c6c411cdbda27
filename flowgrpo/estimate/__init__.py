"""Estimates of the memory and time that a recipe needs, made before a run."""

UTILISATION = 0.2
"""Share of a GPU's peak that a run is assumed to reach; docs/benchmarks/gpu.md has measured shares."""
