"""The papers' claims, measured on the embedded model: `flowgrpo bench claims`."""
