"""Masked language models as a task of the training loop."""
