"""What comes from other people: JSON and arithmetic within bounds, links that lead out, what this machine trusts."""
