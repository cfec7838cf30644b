"""The commands that take containers off their GPUs and back, and the one that lists them."""
