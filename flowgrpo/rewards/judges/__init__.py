"""Rewards whose scores come from a model behind a server."""
