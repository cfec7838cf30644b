"""Brings back what a killed checkpoint or restore left."""
