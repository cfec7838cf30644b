"""One file for a bug report: facts about the host and a checkpoint, without secrets."""
