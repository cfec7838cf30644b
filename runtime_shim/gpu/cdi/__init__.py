"""CDI specifications (cncf-tags/container-device-interface)."""
