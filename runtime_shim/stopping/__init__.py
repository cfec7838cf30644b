"""Processes that stand still: stopped, and let run a little where they must."""
