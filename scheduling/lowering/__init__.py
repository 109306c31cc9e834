"""Pure passes that turn decisions (a layout, a policy, a schedule's name) into a `Schedule`."""
