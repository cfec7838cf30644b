"""One file for a report of a bug: what is known of the host and of a checkpoint, without secrets."""
