"""Plan, simulate, explain, compare, schedule, profile: what these commands do and show."""
