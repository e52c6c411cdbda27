"""Completions of language models as a task of the one loop."""
