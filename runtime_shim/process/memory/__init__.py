"""The memory of another process: its mappings, copies of them, and files that stand in for them."""
