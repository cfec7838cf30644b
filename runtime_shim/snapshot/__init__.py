"""Checkpoint, restore and recover: the order of the steps."""
