"""The training loop, its checkpoints and its run folder."""
