"""Archives: tar headers as engines write them, and compression."""
