"""Locks, suspends and resumes GPU state, and says which processes are stopped meanwhile."""
