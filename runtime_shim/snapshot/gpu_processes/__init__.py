"""GPU state: locked, taken, given back, and who stands still meanwhile."""
