"""Align image and video generators, and language models, with rewards."""

__version__ = "0.1.0"
