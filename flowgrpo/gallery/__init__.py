"""A static page that shows what a run changed, for each prompt and each seed."""
