"""Processes: /proc, pidfds, namespaces."""
