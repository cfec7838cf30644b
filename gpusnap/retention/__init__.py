"""Which checkpoints of a container are kept or removed: rules by age, and each container's history."""
