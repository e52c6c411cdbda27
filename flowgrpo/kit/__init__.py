"""What an author of a reward needs: a package to start from, checks before any training, comparisons, a short run."""
