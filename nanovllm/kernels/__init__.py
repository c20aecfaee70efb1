"""The operations below the layers, in three rooms with the same file names; `table` binds them."""
