"""Other GPUs than at the checkpoint: chosen, reserved, put in place."""
