"""The race: which recipe gains most on the embedded pipeline for the same compute."""
