"""The manifest of a checkpoint, and its place."""
