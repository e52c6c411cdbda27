"""What comes from other people: JSON within bounds, links that lead out of a folder, and what this machine trusts."""
