"""What the papers claim, measured on the embedded default: `flowgrpo bench claims`."""
