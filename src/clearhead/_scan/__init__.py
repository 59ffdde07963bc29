"""How a corpus becomes a table: records, sequences, batches, checkpoints, Parquet."""
