"""AMD: through CRIU's plugin."""
