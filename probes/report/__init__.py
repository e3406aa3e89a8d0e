"""What an analysis is shown as and kept as."""
