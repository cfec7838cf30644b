"""What a restore by Podman has to settle first: volumes, what is in use, and the container that is there."""
