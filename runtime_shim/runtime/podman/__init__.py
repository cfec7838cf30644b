"""What only Podman does with a container: its conmon, its pods, its copy of /dev/shm."""
