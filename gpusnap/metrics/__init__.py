"""What checkpoints and restores took, for Prometheus and the journal."""
