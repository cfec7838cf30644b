"""Commands that a container names for what comes before its checkpoint and after its restore."""
