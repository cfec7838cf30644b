"""Errors of the libraries as messages, progress, and who may do what: for all of the command."""
