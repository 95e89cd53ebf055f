"""Sessions that live in executors: a Spark job of tasks that run until they are drained."""
