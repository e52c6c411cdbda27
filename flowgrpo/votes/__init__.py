"""What people said about samples: choices between two of them, favourites, and the samples of a run."""
