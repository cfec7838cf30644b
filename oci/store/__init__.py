"""A store: many checkpoints in one layout, with staging, commit and garbage collection."""
