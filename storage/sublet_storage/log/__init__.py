"""The log: messages packed in blocks, appended to streams and fetched by offset."""
