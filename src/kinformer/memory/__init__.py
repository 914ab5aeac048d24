"""What outlives a sequence: stores on disk."""
