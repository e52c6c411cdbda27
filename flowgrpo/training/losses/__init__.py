"""What an update of images computes on a rollout: one file for each objective, and what they have in common."""
