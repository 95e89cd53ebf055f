"""What users hold: sessions, plain and asynchronous, their iterators, transactions and dead letters."""
