"""What results.py says of a night: the ledger and runs/ read back, counted, and put in words, tables, pictures and a page."""
