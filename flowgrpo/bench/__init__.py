"""Measurements behind the claims of the documentation, each one command: `flowgrpo bench NAME`."""
