"""Checkpoints by the clock: timers and services of systemd."""
