"""A static page that shows, prompt by prompt and seed by seed, what a run changed."""
