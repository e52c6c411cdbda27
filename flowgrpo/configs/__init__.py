"""Recipes: their schema, how they are read and overridden, and the files that come with the package."""
