"""Configurations of other tools as recipes: what can be carried over, what has no effect here, and what cannot."""
