"""A checkpoint at rest: where it is, what it consists of, in which form."""
