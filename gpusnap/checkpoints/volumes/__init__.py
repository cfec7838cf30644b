"""Named volumes in a checkpoint: their tars, in chunks."""
