"""The commands; each file holds one family of commands."""
