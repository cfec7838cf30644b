"""What the commands do: checkpoint, restore, push and pull, verify, diff."""
