"""Tables: from Parquet and CSV to a scaled series store."""
