"""Options, columns and the database, shared by sources, sinks and jobs in Spark."""
