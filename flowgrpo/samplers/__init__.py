"""Samplers: kernels, solvers, schedules, plans, and the executor that walks any plan as a tree."""
