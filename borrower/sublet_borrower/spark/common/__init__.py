"""What reading, writing and jobs share inside Spark: options, columns, the database."""
