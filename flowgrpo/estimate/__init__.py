"""Estimates of the memory and time that a recipe needs, made before a run."""
