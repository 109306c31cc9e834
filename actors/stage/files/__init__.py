"""Access to files that may be slow, damaged or missing: reads with a time limit, digests, checked writes."""
