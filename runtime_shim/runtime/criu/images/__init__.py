"""CRIU's images: decoded, checked, and changed for a restore."""
