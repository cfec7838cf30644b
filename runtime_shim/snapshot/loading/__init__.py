"""The memory of a checkpoint on its way back into a container's processes."""
