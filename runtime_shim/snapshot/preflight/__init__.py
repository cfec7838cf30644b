"""Checks that refuse a checkpoint before anything has been changed."""
