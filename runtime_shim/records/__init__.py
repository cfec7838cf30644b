"""The manifest of a checkpoint, and where it lies."""
