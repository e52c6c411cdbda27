"""Rewards that run code or queries that a model wrote."""
