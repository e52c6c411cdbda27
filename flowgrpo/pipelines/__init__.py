"""Pipelines: any diffusers flow-matching pipeline as a policy, its prompts, and its trained weights."""
