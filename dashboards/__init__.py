"""Shows what traces and metrics hold; reads, never drives."""
