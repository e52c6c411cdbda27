"""What stands for a picture in the words of a prompt."""

MARK = "<image>"
"""Stands in the text of a prompt for its next picture."""
PART = "\ufffc"
"""Stands for the next picture where a message was written as a list of texts and pictures."""
