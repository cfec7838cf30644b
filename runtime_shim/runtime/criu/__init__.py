"""CRIU under the real runtime: what we inject into it, and what it says."""
