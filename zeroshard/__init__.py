"""The drop-in AdamW that shards optimizer state and gradients over data-parallel ranks."""
