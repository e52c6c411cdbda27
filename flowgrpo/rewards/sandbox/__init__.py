"""Rewards that run what a model wrote."""
