"""The memory of another process: its mappings, copies of them, and files that replace them."""
