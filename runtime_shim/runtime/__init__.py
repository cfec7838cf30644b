"""crun and runc: found, identified and called; containers and bundles as they keep them."""
