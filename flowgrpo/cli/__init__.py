"""The commands, one file for each family of them."""
