"""The consumer: sessions, the agent that connects them to leaders, and Spark.

A **session** consumes: in a plain Python process, or in a task of a Spark executor. It embeds an **agent**, which keeps
one **borrower** per subscription. See README.md.
"""
