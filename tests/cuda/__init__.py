"""What runs on CUDA, checked without a GPU."""
