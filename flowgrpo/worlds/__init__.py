"""The embedded worlds, and how they are built from nothing."""
