"""People's choices between two samples: the file that keeps them, and what can be read from it."""
