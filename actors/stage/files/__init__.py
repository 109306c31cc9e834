"""Files that may be slow, damaged or gone: reads with a time limit, digests, checked writes."""
