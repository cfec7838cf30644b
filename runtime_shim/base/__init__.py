"""Errors, threads, deadlines, signals and the log: used by every part of gpusnap-runtime."""
