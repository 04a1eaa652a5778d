"""Device memory: drivers, the page pool, and the arenas that tensors live in."""
