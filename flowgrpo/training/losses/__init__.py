"""The losses of images on a rollout: one file for each objective, and what objectives have in common."""
