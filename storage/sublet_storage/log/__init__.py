"""The log: messages of a stream packed in blocks, appended and fetched by offset."""
