"""What a model makes outside a run: `flowgrpo sample` and `flowgrpo evaluate`."""
