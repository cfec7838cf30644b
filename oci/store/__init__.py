"""Many checkpoints in one layout: staged, committed, collected."""
