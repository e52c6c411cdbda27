"""Parts, which a recipe chooses by name, and the options of each part."""
