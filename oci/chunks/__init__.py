"""Regions of memory as blobs: cuts, compresses, writes, reads and checks them."""
