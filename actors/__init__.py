"""The runtime: `stage` obeys one schedule on one device, `controller` drives all stages."""
