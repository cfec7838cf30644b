"""crun and runc: finds, identifies and calls them; reads containers and bundles as they keep them."""
