"""Rewards for completions that need no model."""
