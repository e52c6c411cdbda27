"""Trained weights: LoRA adapters and full weights, their averages, shards and files."""
