"""What refuses a checkpoint while nothing has been changed."""
