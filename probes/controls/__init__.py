"""What else a probe could be reading."""
