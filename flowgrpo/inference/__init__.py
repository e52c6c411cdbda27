"""Samples and evaluations of a model outside a run: `flowgrpo sample` and `flowgrpo evaluate`."""
