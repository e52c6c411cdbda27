"""Moving pictures as files."""
