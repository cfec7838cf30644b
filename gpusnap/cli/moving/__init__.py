"""Commands that move a container."""
