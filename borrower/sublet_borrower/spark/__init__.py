"""Sessions inside Spark.

`job.executors` is the native way: a Spark job of N tasks that run until they are drained. Each task is a session of its
own, in the executor's Python worker: it has its own agent, reads blocks straight from Postgres, and calls the user's
function with Arrow batches; Spark only places the tasks and starts them again when they die. Spark's own ways to end
or to watch a task do not suit tasks that never end (a cancelled one runs on for seconds and is then killed; its
figures arrive when it is over). So the driver keeps a small session server, `job.driver_endpoint`: tasks report there,
and hear there that they are to drain.

`sublet.demo.java` finds a Java that Spark runs on, `job.failures` carries exceptions from a task to the driver.

Importing this package loads neither pyspark nor grpc. Python workers are forked from a daemon, and grpc does not
survive a fork: it is loaded in the task, never before.
"""
