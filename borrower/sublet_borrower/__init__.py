"""What a consumer runs: sessions, the agent that keeps them in touch with leaders, and Spark. See README.md.

A **session** is the thing that consumes: a plain Python process, or a task of a Spark executor. It embeds an **agent**,
which keeps one **borrower** per subscription.
"""
