"""The parts of a restore."""
