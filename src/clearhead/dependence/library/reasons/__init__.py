"""What is known of the classes of transformers: what they mean to do, and what causes a fault."""
