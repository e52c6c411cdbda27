"""A person as a reward: a page on this machine shows the samples of a prompt, and takes the marks."""
