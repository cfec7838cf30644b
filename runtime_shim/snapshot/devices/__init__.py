"""Restores on other GPUs than at the checkpoint: they are chosen, reserved and put in place."""
