"""Figures about checkpoints and restores, for Prometheus and the journal."""
