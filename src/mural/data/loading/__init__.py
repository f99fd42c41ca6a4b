"""Loading: batches as sharded tensors, read ahead, augmented, agreed on by all ranks."""
