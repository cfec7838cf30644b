"""Suspends and resumes containers: finds the container, controls its engine, and manages the RAM."""
