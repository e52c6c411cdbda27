"""Images as a task of the one loop."""
