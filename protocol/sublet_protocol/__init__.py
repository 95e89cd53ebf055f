"""What borrowers, agents, leaders and nodes send to each other, and the words of the product. See README.md.

It can be understood, tested and used without a database and without Spark: it imports nothing of ours, and everything
of ours may import it.
"""
