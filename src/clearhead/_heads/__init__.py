"""What statistics per head are made of: moments that merge, batches, and the statistics."""
