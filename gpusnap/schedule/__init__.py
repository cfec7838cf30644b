"""Scheduled checkpoints: timers and services of systemd."""
