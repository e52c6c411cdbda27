"""Pipelines: any diffusers flow-matching pipeline as a policy, and its prompts."""
