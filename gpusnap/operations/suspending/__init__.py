"""Suspends and resumes containers: which one is meant, what its engine does, and how much RAM is left."""
