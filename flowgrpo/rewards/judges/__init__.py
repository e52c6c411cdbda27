"""Rewards that ask a model behind a server."""
