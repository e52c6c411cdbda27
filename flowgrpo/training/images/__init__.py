"""Images as a task of the training loop."""
