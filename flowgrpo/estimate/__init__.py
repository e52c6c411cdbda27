"""Memory and time that a recipe should need, before a run."""
