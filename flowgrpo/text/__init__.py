"""Causal language models as policies: sampling, scoring, trained weights, and an embedded model of arithmetic."""
