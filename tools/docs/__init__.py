"""Generators of documentation, from the declarations in the code."""
