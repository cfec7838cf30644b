"""NVIDIA: the driver's checkpoint API, NVML, and the driver's files."""
