"""Sample -> rows: virtual indexes whose memory grows with records, never with samples."""
