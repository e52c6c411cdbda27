"""Drawn scenes: prompts, drawings, the embedded pipeline, its verifier and its learned scorer."""
