"""Everything that uses pyspark: sources, sinks, and jobs of sessions in executors.

`job.consumption` runs a Spark job of N tasks that last until they are drained. Each task is a session of its own in the
executor's Python worker: it has its own agent, reads blocks straight from Postgres, and calls the user's function with
Arrow batches; Spark only places the tasks and restarts them when they die. Spark's own means to end or to watch a task
do not suit tasks that never end (a cancelled one runs on for seconds and is then killed; its figures arrive when it is
over). So the driver runs a small server, `job.driver_endpoint`, to which tasks report and which requests them to drain.

Importing this package loads neither pyspark nor grpc. Python workers are forked from a daemon, and grpc does not
survive a fork: it is loaded in the task, never before.
"""
