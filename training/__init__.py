"""What a run needs around its loop."""
