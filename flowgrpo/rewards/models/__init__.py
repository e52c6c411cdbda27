"""Rewards for images and videos: learned scorers, and the size of JPEG files."""
