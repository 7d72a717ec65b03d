"""Black-box tests of ``StreamingDataset`` and ``StreamingDataLoader``, beside those of ``lancedb.streaming``."""
