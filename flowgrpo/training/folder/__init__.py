"""The folder of a run: who writes in it, what is written, and how a run resumes from it."""
