"""People's choices between two samples: the file of the choices, and what can be read from it."""
