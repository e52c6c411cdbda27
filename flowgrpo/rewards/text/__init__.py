"""Rewards of completions that need no model."""
