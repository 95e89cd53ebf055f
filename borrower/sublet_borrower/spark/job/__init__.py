"""Sessions in executors: a Spark job whose tasks run until they are drained."""
