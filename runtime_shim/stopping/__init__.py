"""Stops processes, and lets stopped ones run a little if they must."""
