"""Memory plans and layouts: bytes by part and device, before anything is allocated."""
