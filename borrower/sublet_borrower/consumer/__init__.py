"""The consumer's API: `Session`, `AsyncSession`, their iterators, transactions and dead letters."""
