"""Stands in for CRIU's Python package in unit tests, where this Python has none: it is not on PyPI.

It has those of CRIU's messages that gpusnap reads, as a table for PyPI's protobuf to make classes of. In the
test host, which has the real one, tests/integration/test_criu_messages.py holds the table against it.
"""
