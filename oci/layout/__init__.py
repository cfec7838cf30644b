"""OCI image layouts (image-layout.md of the OCI image specification): blobs, and what refers to them."""
