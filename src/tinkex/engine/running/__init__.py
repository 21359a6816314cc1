"""Operations while they run: the table that owns them, what each does to its run, the decode batches, and lost workers."""
