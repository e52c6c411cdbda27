"""Several processes of one run."""
