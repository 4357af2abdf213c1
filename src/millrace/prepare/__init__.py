"""Sources -> store: restartable, parallel, in constant memory, byte-identical for any number of workers."""
