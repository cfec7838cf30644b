"""Loads the memory of a checkpoint back into a container's processes."""
