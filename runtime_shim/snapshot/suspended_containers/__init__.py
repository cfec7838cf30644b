"""Containers whose GPU state is kept in RAM, or in a store, while other containers use their GPUs."""
