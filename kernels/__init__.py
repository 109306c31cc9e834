"""One operator at a time: torch (and later triton) code with no knowledge of plans, ranks or Ray."""
