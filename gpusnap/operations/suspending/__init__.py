"""Containers off their GPUs and back: which one is meant, what its engine has to do, and what RAM is left."""
