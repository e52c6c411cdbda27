"""The embedded worlds, and the code that builds them from scratch."""
