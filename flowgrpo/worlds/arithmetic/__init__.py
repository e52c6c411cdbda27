"""Sums and differences: problems, and the embedded language model."""
