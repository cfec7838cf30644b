"""What only developers run; not installed."""
