"""Rewards of images and videos: learned scorers, and files of pictures."""
