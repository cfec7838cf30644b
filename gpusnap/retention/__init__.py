"""Which checkpoints of a container stay, and which go: rules by age, and what there is of each container."""
