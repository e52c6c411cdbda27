"""Scenes: the embedded world of coloured shapes that the default model, rewards and benchmarks share."""
