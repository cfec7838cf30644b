"""Commands that a container defines for the time before its checkpoint and after its restore."""
