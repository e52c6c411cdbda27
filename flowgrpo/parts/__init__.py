"""Parts: what a recipe chooses by name, and the options that each of them has."""
