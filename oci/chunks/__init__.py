"""Regions of memory as blobs: cut, compressed, written, read and checked."""
