"""The commands that show what is in checkpoints, and those that keep stores in order."""
