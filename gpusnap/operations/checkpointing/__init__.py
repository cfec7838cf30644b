"""The work of `gpusnap checkpoint`: into a store, a registry or an archive, by Podman and its runtime."""
