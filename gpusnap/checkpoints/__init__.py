"""Stored checkpoints: their places, parts and formats."""
